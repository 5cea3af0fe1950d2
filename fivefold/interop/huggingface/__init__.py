"""Trainers on transformers: TrainingArguments with accelerate's YAML (FSDP, DeepSpeed, DDP) or DeepSpeed's JSON.

keys · names   keys with their defaults; the names that Axolotl and LLaMA-Factory use      deepspeed   its bucket sizes
effects · harmless   keys that change the step and are not counted; keys without effect
optimizer      the optimizer and the schedule of its learning rate
collect_keys   collects keys from the files that a launch line or a config names
read           keys to model, layout and job
write          accelerate's YAML or DeepSpeed's JSON, arguments, config.json, and a launch script
"""
