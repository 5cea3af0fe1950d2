"""Trainers on transformers: TrainingArguments with accelerate's YAML (FSDP, DeepSpeed, DDP) or DeepSpeed's JSON.

effects · harmless  keys that nothing here counts, and keys without effect · optimizer   it and its learning rate
keys · names   their keys, with defaults; Axolotl's and LLaMA-Factory's names of the same · deepspeed   its sizes
gather         keys from the files that a launch line or a config names      read   to model, layout and job
write          accelerate's YAML or DeepSpeed's JSON, arguments, config.json, and a script that starts
"""
