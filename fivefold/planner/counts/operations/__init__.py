"""The operations of a decoder as one rank runs them; FLOPs, bytes, messages and time are counted from them.

layer                     embedding, block, head
attention/ · mixers/      token mixers: grouped or latent attention; others, one module each
chunks                    groups of chunks of a sequence, for recurrent token mixers
indexer                   scores and top-k keys of sparse latent attention
hyper_connections         several residual streams, mixed with weights of each token
altup                     a stream of several parts, of which a layer computes one and predicts the others
per_layer_inputs          one tensor of inputs for all layers, of which each reads its part
feedforward               MLP and mixture of experts
linear · fused_linears    column and row parallel; several linear layers on one input as one operation
adapters                  low-rank adapters over frozen weights
fused_adapters            linear layers on one input with their adapters, as the trainer's operations
op                        the record of an operation
symbolic                  tensors without values, whose bytes are counted as PyTorch allocates and frees them
recompute · narrow        operations that run again in the backward; activations kept in fp8
local_shapes              a rank's share of a micro-batch
launches                  kernels that the trainer's own scans and routing launch
mtp                       the head, with multi-token prediction
vision                    images: a vision tower and its projector, as part of the embedding
autocast                  operations under PyTorch's autocast
unit_cache                operations by unit and shape, built once each
"""
