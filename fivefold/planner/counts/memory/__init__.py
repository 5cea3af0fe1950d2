"""Bytes allocated on one rank.

peak         states at rest, the peak of a step and its cause: ``memory``
passes/      live bytes at the moments of one pass through a stage
reductions   gradients until they are reduced
in_flight    the passes, and what other micro-batches keep allocated during each
pipelined_passes   those of a pipeline from its schedule, as columns
stages       a stage's groups of equal units; its buffers; what is allocated throughout a step
liveness     one unit's forward and backward, operation by operation
states       weights, gradients and optimizer state of a unit
allocator    allocated bytes to reserved bytes to the driver's figure
host         host memory of a node that offloading takes

docs/explanation/how-a-step-costs/walk.md goes from ``memory`` to the bytes of one operation, call by call.
"""
