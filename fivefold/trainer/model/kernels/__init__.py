"""Memory-bound operations that save as little for the backward as a fused GPU kernel.

choice     the set of kernels that a job gets on this computer
eager      the set that runs PyTorch's own kernels one by one (``Kernels``); modules hold a set as ``kernels``
fused/ · triton/   each operation as one kernel: autograd functions over custom ops; the Triton kernels
norms · rotary · activations · loss · rows   the operations, as autograd functions
kinds      the kernels of each activation

All sets save the same bytes for the backward; ``planner/counts/operations/op.py`` counts them.
"""
