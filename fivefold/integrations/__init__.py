"""Predictions within other trainers: their step is predicted, measured and logged next to the prediction.

huggingface   a callback of the Trainer of transformers
lightning     a callback of the Trainer of Lightning
accelerate    a context manager around a loop of Accelerate
reporting     what they share: measuring, printing and logging a step
"""
