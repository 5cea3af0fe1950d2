"""The memory-bound operations with each forward and each backward as one Triton kernel.

kernels    the set of them, a ``Kernels``                            launch   program sizes; availability of Triton
norms · rotary · activations · loss · rows   autograd functions over custom ops, whose bodies call ``kernels/triton/``
casts      to fp8 with scales, called by the custom op of ``model/float8/cast.py``
dropout    the mask of a dropout, called by the custom op of ``model/dropout.py``

A custom op is one operation for the meter, the dry run (which has no Triton) and torch.compile.
"""
