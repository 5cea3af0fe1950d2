"""Memory-bound operations, which save as little for the backward as a fused kernel of a GPU.

choice     which set a job gets here
eager      the set of them as PyTorch's own kernels, one after another (``Kernels``); modules have one as ``kernels``
fused/ · triton/   … each as one kernel: autograd functions over custom ops; the kernels themselves
norms · rotary · activations · loss · rows   the operations, as autograd functions
kinds      numbers of the activations for Triton

They save the same bytes whatever computes them; ``planner/counts/operations/op.py`` counts those.
"""
