"""Diagnose why a run fails, does not fit in memory, or loses precision.

doctor/    memory and FLOPs of a user's own module     explain/   logs, snapshots and stacks that a failed run left
numerics   the error of a precision recipe against fp32
"""
