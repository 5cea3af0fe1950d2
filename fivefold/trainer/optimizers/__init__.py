"""The update of sharded weights. The module with an optimizer's name builds it.

adamw · adamw8bit · muon · adafactor · sgd   the optimizers
optimizer                builds the job's optimizer; gradient clipping; learning-rate schedules
optimized_weights        the input of every optimizer's ``build``
fp32_update              AdamW with fp32 arithmetic          low_precision_moments   AdamW with moments of 1 or 2 bytes
loss_scaling             loss scaling for fp16
gather_matrices          gathers a sharded matrix
"""
