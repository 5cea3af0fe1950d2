"""Memory-bound operations, which save as little for the backward as a fused kernel of a GPU.

eager      the set of them as PyTorch's own kernels, one after another (``Kernels``); modules have one as ``kernels``
norms · rotary · activations · loss   the operations, as autograd functions

They save the same bytes whatever computes them; ``plan/count/operations/op.py`` counts those.
"""
