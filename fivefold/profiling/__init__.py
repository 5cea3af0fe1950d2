"""Measure where the time of a step goes: traces of any trainer; predictions next to measurements for this one.

traces/       reads traces of the PyTorch profiler
closed_loop   predicts a step, trains, and writes both to ``step.json``
attribution   the time of a traced step by cause     findings   the problems of a traced step
trace_advice · step_advice   the largest loss of traces or of a watched step, and the change
watch_loop    a training loop of the user's own, measured as a step
"""
