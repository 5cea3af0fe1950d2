"""How long it takes: seconds.

roofline · measured · compute · passes   a kernel; calibrated; an operation; one of many kernels
profiled                        units that were measured in a step, which come before all curves
network · small_messages        a collective, by where its ranks lie; those that carry no tensors of the model
unit_time · units · data_parallel   a unit with its exposed messages; all units; ZeRO's messages
durations · timeline · steady_state · waves   a stage's actions; the step; long schedules from short; many at once
spans · memory_over_time        the step drawn          errors   the error to expect · memory_risk
"""
