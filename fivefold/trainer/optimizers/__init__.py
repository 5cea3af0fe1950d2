"""The update of sharded weights.

optimizer     which optimizer, clipping, learning rate          loss_scaling      for fp16
fp32_update   AdamW and SGD of weights of any width             narrow_moments    AdamW with moments of 1 or 2 bytes
eight_bit     the codes of 8-bit AdamW
muon · adafactor   updates of whole matrices                    gather_matrices   how a sharded matrix becomes whole
"""
