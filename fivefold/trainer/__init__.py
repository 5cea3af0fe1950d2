"""Runs a training step: loop → engine → build.

run · supported · supported_models · process   the run file; checks of what the trainer supports; processes
host · run_lock                     checks this computer against the run's machine; one training at a time in a folder
loop · engine · build · evaluation  the training loop; one step; modules and optimizer of a rank; held-out loss
model/ · parallel/ · optimizers/            modules and kernels; parallelisms; optimizers
data/ · checkpoint/ · faults/ · generate/   batches of tokens; checkpoints; fault tolerance; text generation
measure/ · logs/                            measurements of a step; logs of a run
"""
