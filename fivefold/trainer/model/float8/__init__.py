"""Matmuls with operands in eight or four bits.

attach   the layers that use them       cast       tensors to fp8 with scales, by tensor, row or tile
matmul   linear layers                  blocks     to MXFP8 and NVFP4
grouped  experts                        units      products on the chip's fp8 units, and what is missing for them
"""
