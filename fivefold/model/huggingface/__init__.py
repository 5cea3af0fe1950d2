"""Hugging Face models: configs of each family to our model and back, and the names of their tensors.

families · dense · experts   from_config: one mapping per family
config · keys                a config.json as a checked record; which keys each family's reference code reads
model_types · remote_code    what transformers has a class for; files of which it has none
rope · defaults · dense_defaults   rotary settings; what a missing key means
names · tables               tensors, experts, order of rotary rows; names of dense families
export · write               a model as a config.json; of dense families
"""
