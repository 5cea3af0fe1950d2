"""Fivefold plans, rehearses, trains and proves the training step of a large language model."""
