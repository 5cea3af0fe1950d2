"""Memory of a tape: live bytes over time, and the bytes that PyTorch's CUDA allocator reserves for them.

breakdown           live bytes by category at every event, the peak and its cause, the largest groups of live storages
caching_allocator   PyTorch's allocator, block by block          reserved   the bytes it reserves for a rank's tapes
snapshot            writes a file for PyTorch's memory viewer
"""
