"""The largest numbers that records take, and why: what is beyond is a slip of the hand, refused before anything counts.

A limit lies well above all that was built or published, and above what ``ask model`` makes of it: 32 times as wide.
Counts of bytes are 64-bit integers, so that what a rank holds has a limit too: ``COUNTED_BYTES``.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

# Of a model
Layers = Annotated[int, Field(ge=1, le=2**12)]  # DeepNet has 1,000 (arXiv:2203.00555), Llama 3 405B 126
Width = Annotated[int, Field(ge=1, le=2**20)]  # 25,600 for a trillion dense parameters (arXiv:2104.04473)
Ffn = Annotated[int, Field(ge=1, le=2**22)]  # four times the width
Heads = Annotated[int, Field(ge=1, le=2**14)]  # 160 for a trillion (ibid.), 128 in Llama 3 405B
HeadDim = Annotated[int, Field(ge=1, le=2**14)]  # 256 in Gemma, 192 in DeepSeek-V3
Latent = Annotated[int, Field(ge=1, le=2**20)]  # of latent attention: below the width
Vocab = Annotated[int, Field(ge=1, le=2**24)]  # 262,208 in Gemma 3, a million in XLM-V (arXiv:2301.10472)
Experts = Annotated[int, Field(ge=1, le=2**20)]  # a million (arXiv:2407.04153), 2,048 in Switch (arXiv:2101.03961)
Tokens = Annotated[int, Field(ge=1, le=2**30)]  # of a sequence: 100 million were shown (LTM-2-mini), 10 million sold
Scalar = Annotated[float, Field(ge=-1e30, le=1e30)]  # that a tensor is multiplied by; fp32 ends at 3.4e38
Positive = Annotated[float, Field(ge=1e-30, le=1e30)]
PARAMETERS = 10**17  # BaGuaLu ran 1.74e14 (PPoPP 2022); states of 20 bytes each would be 2 EB

# Of a job
Sequences = Annotated[int, Field(ge=1, le=2**24)]  # of a batch: DeepSeek-V3 has 15,360, 60 million tokens in all
Steps = Annotated[int, Field(ge=1, le=2**40)]  # a token a step for a trillion tokens
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # what torch takes
Multiple = Annotated[int, Field(ge=1, le=2**20)]  # to which a vocabulary is padded: Megatron has 128
ElementBytes = Annotated[int, Field(ge=1, le=8)]  # fp64
KeptBytes = Annotated[int, Field(ge=0, le=8)]  # 0: is not kept
RAMP_SIZES = 2**12  # batches on the way to the whole one: GPT-3's way has 48 (arXiv:2104.04473)
RUN_TOKENS = 1e18  # of a whole run: 1e14 are all the text there is (Epoch AI, arXiv:2211.04325)

# Of a layout
RANKS = 9_999_999  # seven digits; clusters of a million accelerators are planned
Degree = Annotated[int, Field(ge=1, le=RANKS)]
PLAYED = 2**18  # stages times micro-batches of a schedule without a period, which are played one after another: 10 s

# Of a machine
Bytes = Annotated[int, Field(ge=1, le=2**60)]  # as COUNTED_BYTES
Rate = Annotated[float, Field(ge=1, le=1e24)]  # bytes/s, FLOP/s: all computers of the world together make 1e22
Share = Annotated[float, Field(ge=1e-6, le=1e3)]  # of a rate
Seconds = Annotated[float, Field(ge=0, le=1e6)]  # of a message's start: a light second is far
Dollars = Annotated[float, Field(ge=0, le=1e9)]
Watts = Annotated[float, Field(ge=1e-3, le=1e9)]
COUNTED_BYTES = 2**60  # 1 EiB, more than all accelerators of the world hold; sums of several still fit 64 bits
