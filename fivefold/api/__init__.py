"""The verbs as functions, with the words and defaults of the command line: what ``import fivefold as ff`` offers.

verbs                  predict, search, compare, ask, sweep, dryrun, train, trace
job_fields · job_words a job from keyword arguments; their types, written from the records
documentation          help texts of the request schemas in docstrings
watch                  a loop of one's own, measured as a step
training               train, in processes of its own
configs                configs of other software: read_config
load                   what an earlier command has written: a run's folder, a step, a search, a sweep
"""
