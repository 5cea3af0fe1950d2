"""One file per parallelism; ``apply`` applies all of them in order.

tensor · context · ring_blocks · expert   tp with sp and vocabulary; cp by ring and Ulysses; ep and etp
zero · gradients · shard · placement      ZeRO: weights; gradient reductions; a rank's shard; the weights of each rank
fp8_gather · host_memory                  all-gather in fp8; tensors in host memory, copies to and from the device
pipeline · interleave                     the runtime of schedule tables; a forward concurrent with a backward
recompute · recomputed                    the operations that run again in the backward; their tensors
mesh · collectives · listener             process groups; collectives along an axis; observers of messages
"""
