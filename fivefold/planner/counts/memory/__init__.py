"""Bytes allocated on one rank.

rank_memory        states at rest, the peak of a step and its cause
states             weights, gradients and optimizer state of a unit
buffers            inputs, rotary tables, duplicate gradients
liveness           activations that a unit keeps, operation by operation    backward   what its backward frees
in_flight          micro-batches in flight            pass_streams   messages between stages
peak_moments       moments of a pass                  live_bytes     live bytes at one moment
weights_pass       deferred weight gradients
stage              a pipeline stage                   stage_buffers  its buffers
reductions         gradients until they are reduced   coalesced_gradients   gradients in shared buckets
allocator          allocated bytes to reserved bytes to the driver's figure
host               host memory of a node that offloading takes
"""
