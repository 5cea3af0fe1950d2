"""A plain decoder, its layers and kernels. Knows nothing distributed.

transformer      head with loss, and the whole           embed · block   ids → stream; a layer, by the kind of its block
attention · flash_attention · band_attention · unfused_attention · chunked_attention · score_rule · dropout   attention
mlp · moe · routing · experts · norm · linear · linear_op · mtp   the other layers; linear ones in compiled code
kernels/ · logits · chunked_loss · float8/   what keeps little: norms, rotary, activations, loss; fp8 matmuls
precision · tf32 · operation   a recipe as dtypes; products in tf32; the seam at which recomputation steps in
"""
