"""A plain decoder, its layers and kernels. Knows nothing distributed.

transformer      embedding, blocks, head with loss
attention · flash_attention · mlp · moe · routing · experts · norm · linear   its layers
kernels/ · chunked_loss · float8/   autograd functions that keep little: norms, rotary, SwiGLU, loss; fp8 matmuls
precision · tf32 · operation   a recipe as dtypes; products in tf32; the seam at which recomputation steps in
"""
