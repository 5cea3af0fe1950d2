"""The time model: seconds of operations, messages, stages and the full step.

constants the constants of the time model, as one record roofline · measured · compute a kernel; a calibrated kernel; an
operation eager_kernels operations that PyTorch runs as many kernels profiled units measured within a step, which take
precedence over all curves network · small_messages a collective by the placement of its ranks; messages other than
model tensors unit_time · gather_reduce · units a unit with its exposed messages; its ZeRO messages; all of them by
layout unit_overlap · stage_time · action_time units overlapped with ZeRO's messages; stages; actions of a schedule
data_parallel · update_time · timeline ZeRO's messages at the ends of a step; the update; the step steady_state long
schedules from short ones spans · memory_over_time the step over time errors · memory_risk the expected error; the
probability of running out of memory
"""
