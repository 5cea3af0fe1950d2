"""Does the promise hold? The rooms that run torch to find out.

dryrun/ · doctor/          rehearse the real training code, or a module of one's own, on one CPU
calibrate/ · published/    measure this computer; predictions against published runs (no torch)
sweep/ · trial · finalists   many layouts of many models, machines and jobs; a few steps of one, or of the best
traces/ · explain/         anybody's profiler traces: where the time went; why a run failed (no torch)
prove · watched · numerics   predict, train, measure, compare; anybody's loop; what a precision loses against fp32
split · findings           where the time of a traced step went; what was wrong with it
"""
