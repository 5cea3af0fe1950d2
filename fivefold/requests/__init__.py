"""Requests as schemas and records, and their answers: shared by the command line, the web page and the Python API.

schema · fields · commands   the base of requests; fields that several share; the request of each command
settings                 the user's settings: stack, machine, prices, output
words · job · machines   numbers with units; a job from a file, options and ``--set``, in this order; machines
batch                    the global batch of a question that names none
search · offers          the options of a search; one run on several machines, and their prices
playbook · sweep         from tokens to a run file; where a sweep's rows go, and how they are measured
configs                  configs of other software as questions, and what an answer must say about their keys
catalogs                 lists of models, machines and stacks, in full or by a word
output_schemas           the published JSON schema of what each command prints
answers · cases · extras the questions of ``ask``; the cases of a comparison; which extra brings a missing package
"""
