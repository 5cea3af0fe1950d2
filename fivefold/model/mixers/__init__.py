"""Token mixers other than attention: one module for each kind, with its record and its weights.

short_conv         gated short convolution (LFM2)
gated_delta_net    Gated DeltaNet with an output gate (Qwen3-Next)
kimi_delta         Kimi delta attention (Kimi Linear)
lightning          lightning attention (MiniMax-01)
mamba              Mamba (Falcon Mamba, Jamba)
mamba2             Mamba-2 (Bamba, Granite 4, Nemotron-H)
rg_lru             RG-LRU (Griffin, RecurrentGemma)
rwkv               time mixing (RWKV-4)
compressed_attention    attention to compressed keys, three kinds of layers (DeepSeek-V4)
chunk_groups       consecutive chunks that the trainer's scans compute at once
kinds              the names of all kinds, and the union of their records
geometry           what all have in common: what tensor parallelism divides

``Model.mixers`` names the kind of every layer; the geometry of a kind is the field of ``Model`` with its name.
"""
