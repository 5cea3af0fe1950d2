"""How long a step takes: seconds.

constants                       the constants of all that follows, as one record
roofline · measured · compute   a kernel; a calibrated kernel; an operation
eager_kernels                   operations that PyTorch runs as many kernels
profiled                        units measured within a step, which are preferred to all curves
network · small_messages        a collective by the placement of its ranks; messages without tensors of the model
unit_time · gather_reduce · units   a unit with its exposed messages; its messages of ZeRO; all of them by layout
unit_overlap · stage_time · action_time   units with ZeRO's messages beside them; stages; actions of a schedule
data_parallel · update_time · timeline   ZeRO's messages at the ends of a step; the update; the step
steady_state   long schedules from short ones
spans · memory_over_time        the step over time
errors · memory_risk            the expected error; the probability of running out of memory
"""
