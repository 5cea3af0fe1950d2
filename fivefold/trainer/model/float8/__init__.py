"""Matmuls with operands in eight or four bits.

attach   which layers use them          cast       tensors to fp8 with scales, by tensor, row or tile
matmul   linear layers                  blocks     to MXFP8 and NVFP4
grouped  experts                        units      products on the chip's own units, and what lacks them
"""
