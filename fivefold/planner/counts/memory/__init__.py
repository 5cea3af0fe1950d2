"""Bytes that live on one rank.

rank_memory   states at rest, the peak of a step and its cause
states        weights, gradients, optimizer of a unit          buffers    inputs, rotary tables, duplicate gradients
liveness      activations kept by a unit, op by op · backward  in_flight  micro-batches, pass_streams  messages
peak_moments  of a pass, each a · moment · weights_pass        its weight gradients that were put off
stage         a pipeline stage · stage_buffers · reductions    gradients until they are reduced · joined
allocator     allocated to reserved to the driver's figure     host       memory of a node that offloading takes
"""
