"""The update of sharded weights.

optimizer         which optimizer, clipping, learning-rate schedule
fp32_update       AdamW and SGD with fp32 arithmetic         low_precision_moments   AdamW with moments of 1 or 2 bytes
eight_bit         codes of 8-bit AdamW                       loss_scaling            loss scaling for fp16
muon · adafactor  updates of full matrices                   gather_matrices         gathers a sharded matrix
"""
