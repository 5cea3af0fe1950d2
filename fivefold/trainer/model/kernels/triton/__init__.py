"""The kernels themselves, in Triton: imported only where one runs, as the package may be absent.

norms · rotary · activations · loss · rows · casts   what ``kernels/fused/`` calls, one module for each of its own

They run on GPUs; with ``TRITON_INTERPRET=1`` set before triton is imported, on CPUs too (slowly), as the tests do.
"""
