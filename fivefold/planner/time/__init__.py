"""How long a step takes: seconds.

constants                       the constants of all that follows, as one record
roofline · measured · compute   a kernel; a calibrated kernel; an operation
eager_kernels                   operations that PyTorch runs as many kernels
profiled                        units measured within a step, which are preferred to all curves
network · small_messages        a collective by the placement of its ranks; messages without tensors of the model
unit_time · units · data_parallel   a unit with its exposed messages; all units; messages of ZeRO
stage_time · durations · timeline   a stage; actions of a schedule; the step
steady_state · batched_schedules   long schedules from short ones; many schedules at once
spans · memory_over_time        the step over time
errors · memory_risk            the expected error; the probability of running out of memory
"""
