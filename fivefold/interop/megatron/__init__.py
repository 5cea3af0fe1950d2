"""Megatron-LM, Megatron-Core, Megatron-Bridge, NeMo 2: arguments in a script, a launch line, a YAML, a checkpoint.

keys · flags   its arguments with their defaults; other names of the same
effects · harmless   arguments that nothing here counts, and arguments without effect
model          arguments to a model, and back       read   to layout and job       back   from layout and job
args           the format: read and written      bridge · bridge_keys   saved configs of Bridge and NeMo 2
"""
