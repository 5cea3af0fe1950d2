"""The update of sharded weights.

optimizer     which optimizer, clipping, learning rate          loss_scaling      for fp16
fp32_update   AdamW and SGD of weights of any width             eight_bit         AdamW with 8-bit moments
muon · adafactor   updates of whole matrices                    gather_matrices   how a sharded matrix becomes whole
"""
