"""The Python API: the commands as functions, with the arguments and defaults of the command line (``import fivefold``).

functions              predict, search, compare, ask, sweep, dryrun, train, trace
job_fields · job_words a job from keyword arguments; the types of these, generated from the records
documentation          adds help texts of the request schemas to docstrings; errors name arguments, not options
watch                  measures a step of any training loop
training               train, in separate processes
load                   reads what an earlier command has written, and configs of other software
"""
