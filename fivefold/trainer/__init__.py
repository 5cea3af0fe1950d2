"""Runs a training step: loop → engine → build.

run · supported · process           the run file; what the engine runs; processes and their launch
host · run_lock                     this computer against the run's machine; one training at a time in a folder
loop · engine · build · evaluation  the training loop; one step; modules and optimizer of a rank; held-out loss
parameter_check                     that modules and the table of weights agree, whenever they are built
model/ · parallel/ · optimizers/            what is computed; spread over ranks; updated
data/ · checkpoint/ · faults/ · generate/   what is read; saved; survived; written by the model
measure/ · logs/                            what a step did; what a run tells
"""
