"""Matmuls with operands in eight bits.

attach   which layers use them          cast       tensors to fp8 with scales, by tensor, row or tile
matmul   linear layers                  grouped    experts
"""
