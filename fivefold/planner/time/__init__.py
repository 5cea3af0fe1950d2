"""The time model: seconds of operations, messages, stages and the full step.

constants                           the constants of the time model, as one record
roofline · measured_kernels · compute a kernel; a calibrated kernel, also within a step; an operation
eager_kernels                       operations that PyTorch runs as many kernels
profiled                            units measured within a step, which take precedence over all curves
network                             a collective by the placement of its ranks
unit_time · gather_reduce · units   a unit with its exposed messages; its ZeRO messages; all of them by layout
unit_overlap · stage_time           units overlapped with ZeRO's messages; stages
action_time · steady_state          actions of a schedule; long schedules from short ones
data_parallel · update_time         ZeRO's messages at the ends of a step; the update
step_overhead                       the host and the waits of a step on a calibrated computer
timeline                            the step
spans · memory_over_time            the step over time
errors · ratio_errors               the expected error of a step, and of the ratio of two
memory_risk                         the probability of running out of memory
"""
