"""Frozen weights in few bits, one module per format.

weight    the interface that each fills      formats   all of them by the format of the base
four_bit  4-bit NormalFloat (nf4) or floats (fp4) as bitsandbytes stores them, with double quantization (QLoRA) or not
int8      one fp32 scale for each row, as bitsandbytes' LLM.int8 stores it
fp8       E4M3 with one fp32 scale for each block of 128 x 128, as DeepSeek-V3 is published; experts too
mxfp4     routed experts in E2M1 with a power of two for each 32 elements of a row, as gpt-oss is published
"""
