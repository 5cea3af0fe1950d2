"""Hugging Face models: configs of each family to our model and back, and the names of their tensors.

families · experts   from_config: one mapping per family, dense and of experts
config · keys        a config.json as a checked record; which keys each family's reference code reads
rope · defaults      rotary settings; what a missing key means
names · export       tensors, experts, order of rotary rows; a model as a config.json
"""
