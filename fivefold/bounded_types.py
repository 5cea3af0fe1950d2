"""Numeric types with the limits that records accept: a number beyond them is treated as a typing error.

Each limit is well above anything built or published, and above what ``ask model`` derives from it (32 times the width).
Byte counts are 64-bit integers, so the bytes of a rank are limited too: ``COUNTED_BYTES``.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

# Limits of a model
StageLayers = Annotated[int, Field(ge=0, le=2**12)]  # an end of a pipeline may have none
Layers = Annotated[int, Field(ge=1, le=2**12)]  # DeepNet has 1,000 (arXiv:2203.00555), Llama 3 405B 126
LayerIndex = Annotated[int, Field(ge=0, le=2**12)]
Width = Annotated[int, Field(ge=1, le=2**20)]  # 25,600 for a trillion dense parameters (arXiv:2104.04473)
Ffn = Annotated[int, Field(ge=1, le=2**22)]  # four times the width
Heads = Annotated[int, Field(ge=1, le=2**14)]  # 160 for a trillion (ibid.), 128 in Llama 3 405B
HeadDim = Annotated[int, Field(ge=1, le=2**14)]  # 256 in Gemma, 192 in DeepSeek-V3
Latent = Annotated[int, Field(ge=1, le=2**20)]  # rank of latent attention, below the width
Vocab = Annotated[int, Field(ge=1, le=2**24)]  # 262,208 in Gemma 3, a million in XLM-V (arXiv:2301.10472)
Experts = Annotated[int, Field(ge=1, le=2**20)]  # a million (arXiv:2407.04153), 2,048 in Switch (arXiv:2101.03961)
Tokens = Annotated[int, Field(ge=1, le=2**30)]  # per sequence: 100 million (LTM-2-mini), 10 million offered
Scalar = Annotated[float, Field(ge=-1e30, le=1e30)]  # a factor on a tensor; fp32's maximum is 3.4e38
Positive = Annotated[float, Field(ge=1e-30, le=1e30)]
PARAMETERS = 10**17  # BaGuaLu ran 1.74e14 (PPoPP 2022); states of 20 bytes each would be 2 EB

# Limits of a job
Sequences = Annotated[int, Field(ge=1, le=2**24)]  # per batch: DeepSeek-V3 has 15,360 (60 million tokens)
Steps = Annotated[int, Field(ge=1, le=2**40)]  # a trillion steps of one token
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # as torch.manual_seed
Multiple = Annotated[int, Field(ge=1, le=2**20)]  # a vocabulary is padded to a multiple of it: Megatron has 128
Elements = Annotated[int, Field(ge=0, le=2**48)]  # of a message or buffer; 2**48 is "all"
ElementBytes = Annotated[int, Field(ge=1, le=8)]  # fp64
KeptBytes = Annotated[int, Field(ge=0, le=8)]  # 0: the tensor is not kept
RAMP_SIZES = 2**12  # batch sizes in a ramp-up: GPT-3 has 48 (arXiv:2104.04473)
RUN_TOKENS = 1e18  # per run: all text in existence is about 1e14 (Epoch AI, arXiv:2211.04325)

# Limits of a layout
RANKS = 9_999_999  # seven digits; clusters of a million accelerators are planned
Degree = Annotated[int, Field(ge=1, le=RANKS)]
MAX_SIMULATED_ACTIONS = 2**18  # stages · micro-batches of a schedule without a period, all of which are simulated: 10 s

# Limits of a machine
Bytes = Annotated[int, Field(ge=1, le=2**60)]  # as COUNTED_BYTES
Rate = Annotated[float, Field(ge=1, le=1e24)]  # bytes/s, FLOP/s: all computers of the world together have 1e22 FLOP/s
Share = Annotated[float, Field(ge=1e-6, le=1e3)]  # of a rate
Seconds = Annotated[float, Field(ge=0, le=1e6)]  # latency of a message
Dollars = Annotated[float, Field(ge=0, le=1e9)]
Watts = Annotated[float, Field(ge=1e-3, le=1e9)]
COUNTED_BYTES = 2**60  # 1 EiB, more than all accelerators of the world hold; sums of several still fit 64 bits
