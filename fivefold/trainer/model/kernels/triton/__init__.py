"""The Triton kernels: imported only when one runs, because the package may be missing.

norms · rotary · activations · loss · rows · casts · dropout  called by the modules of these names in ``kernels/fused/``

They run on GPUs; with ``TRITON_INTERPRET=1`` set before triton is imported, on CPUs too (slowly), as in the tests.
"""
