"""How long it takes: seconds.

roofline · measured · compute   a kernel; from calibration; an operation forward and backward
network                         a collective, by where its ranks lie
units · data_parallel           a unit with its exposed messages; ZeRO's gathers and reductions
timeline · steady_state         the step; long schedules from short ones
spans · memory_over_time        the step drawn          errors   the error to expect
"""
