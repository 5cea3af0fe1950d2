"""Diagnose why a run fails, does not fit in memory, or loses precision.

doctor/    memory and FLOPs of a user's own module     explain/   logs, snapshots, stack traces of a failed run
numerics   the error of a precision recipe against fp32
"""
