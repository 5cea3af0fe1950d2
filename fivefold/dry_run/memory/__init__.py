"""From a tape to memory: what lives when, and what PyTorch's CUDA allocator makes of it.

breakdown · living  live bytes by category at every event, the peak and its cause; the largest groups at any moment
caching_allocator   PyTorch's allocator, block by block          reserved   what it reserves for a rank's tapes
snapshot            a file for PyTorch's memory viewer
"""
