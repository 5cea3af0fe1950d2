"""A plain decoder, its layers and kernels. Contains no parallelism.

transformer      the model: embedding, blocks, head with loss
embed · block    token ids to hidden states; a decoder layer
rotary           rotary position tables
attention · flash_attention · sliding_window_attention · unfused_attention · chunked_attention   attention, its kernels
expert_attention                  attention whose queries and output experts make
indexed_attention · indexer · sparse_attention   latent attention to chosen keys, their choice, its kernels
attention_mask   score scaling and the keys that a query sees     dropout         dropout masks equal in every layout
differential · dynamic_mask   pairs of heads whose outputs are subtracted; masks that values make
mixers/          token mixers other than attention, one module each
mlp · moe · router · routing · experts · norm · norm_gate · mtp   the other layers
sparse_mixer                      experts that training draws
receptance_mlp · token_shift      the feed-forward of RWKV-4; means of a token and the one before it
per_layer_inputs · altup · hyper_connections   what ids add to each layer; streams of several parts
linear · linear_op                linear layers; the same in compiled blocks
lora · expert_lora · embed_lora   low-rank adapters next to frozen linear layers, experts and the embedding
quantized/                        frozen weights in few bits, one module per format
kernels/ · logits · chunked_loss  memory-bound operations that save little for the backward; logits and loss
preference_loss                   the loss of direct preference optimization (DPO)
float8/ · precision · tf32        matmuls in fp8; a recipe as dtypes; products in tf32
operation                         the call through which recomputation replaces an operation
"""
