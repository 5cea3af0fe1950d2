"""The update of sharded weights. The module with an optimizer's name builds it.

adamw · adamw8bit · muon · adafactor · sgd   the optimizers
optimizer                which optimizer, clipping, learning-rate schedule
optimized_weights        what an optimizer is given
fp32_update              AdamW with fp32 arithmetic          low_precision_moments   AdamW with moments of 1 or 2 bytes
eight_bit                codes of 8-bit AdamW                loss_scaling            loss scaling for fp16
gather_matrices          gathers a sharded matrix
"""
