"""Does the promise hold? The rooms that run torch to find out.

dryrun/ · doctor/        rehearse the real training code, or a module of one's own, on one CPU
calibrate/ · published/  measure this computer; predictions against published runs (no torch)
prove · numerics         predict, train, measure, compare; what a precision loses against fp32
split · findings         where the time of a traced step went; what was wrong with it
dryrun/      rehearse the real training code for any number of ranks on one CPU
doctor/      the same for a module of one's own
calibrate/   measure this computer
sweep/       many layouts of many models, machines and jobs, predicted and measured
prove · trial · numerics   predict, train, measure, compare; a few steps of a layout; a precision against fp32
prove · numerics   predict, train, measure, compare; what a precision loses against fp32
traces/      where the time of a real run went, read from anybody's profiler traces (no torch)
published/   predictions against published runs (no torch)
"""
