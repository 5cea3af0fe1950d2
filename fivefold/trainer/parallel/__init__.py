"""One file per parallelism; ``apply`` is all of them in order.

tensor · context · ring_blocks · expert   tp with sp, vocabulary; cp ring and ulysses; ep and etp
zero · entry · gradients · shard · placement · fp8_gather   ZeRO: weights; reductions; a rank's part; who holds what
pipeline · interleave       the runtime of schedule tables; F beside BW
recompute · recomputed      which operations run again; how their tensors come back
mesh · collectives · listener   process groups; collectives along an axis; who is told of them
"""
