"""Megatron-LM, Megatron-Core, Megatron-Bridge, NeMo 2: arguments in a script, a launch line, a YAML, a checkpoint.

keys · flags           arguments with their defaults; other names of the same
effects · harmless     arguments that change the step and are not counted; arguments without effect
model                  arguments to a model, and back
read · emit            arguments to layout and job; layout and job to arguments
args                   the format
bridge · bridge_keys   saved configs of Bridge and NeMo 2
"""
