"""Checkpoints: all state that the next step depends on, saved so that any later layout can load it.

checkpoint · async_saver      save and load; save while the training goes on
checkpoint_folder · resume    folders that appear atomically; damaged ones are renamed
reshard · full_weights        shards as boxes of full tensors; weights gathered on one rank
huggingface_import · huggingface_export   read and write safetensors
published_tensors             tensors of a folder in few bits, dequantized
peft_adapter · merged_adapter   PEFT adapter folders; adapters merged into the weights of their base
"""
