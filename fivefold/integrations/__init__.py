"""Predictions within other trainers: their step is predicted, measured and logged next to the prediction.

huggingface   a callback of the Trainer of transformers
"""
