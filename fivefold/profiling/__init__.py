"""Where the time of a measured step went: traces of any trainer, and predicted next to measured for our own.

traces/       reads traces of the PyTorch profiler
closed_loop   predicts a step, trains, and writes both to ``step.json``
attribution   the time of a traced step by cause     findings   what is wrong with it
watch_loop    a training loop of the user's own, measured as a step
"""
