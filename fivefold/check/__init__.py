"""Does the promise hold? The rooms that run torch to find out.

dryrun/      rehearse the real training code for any number of ranks on one CPU
doctor/      the same for a module of one's own
calibrate/   measure this computer
prove · split      predict, train, measure, compare; where the time of a traced step went
numerics           what a precision loses against fp32
published/   predictions against published runs (no torch)
"""
