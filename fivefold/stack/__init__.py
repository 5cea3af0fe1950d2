"""The stack: how a training software goes about a step, and what layouts it can run.

spec      the record: kernels, losses, overlap, reductions, memory; the layouts it runs
catalog   named stacks, each fact with the file and commit where it stands
"""
