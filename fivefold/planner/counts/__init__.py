"""The counts of one step, as exact integers that do not depend on a machine: FLOPs, bytes stored, bytes sent.

operations/                        operations of a layer: FLOPs, bytes moved, bytes kept
memory/                            bytes allocated on a rank: states, activations, the peak
traffic · message                  messages that a rank sends in a step
accumulation                       kernels that add gradients over micro-batches
ddp_buckets · parameter_prefetch   messages of several units at once
update                             messages, products and scratch memory of the update
flops                              FLOPs of a step
counts · cache                     all counts of a model and job, in a cache
"""
