"""All that the next step depends on, on disk, for any later layout.

checkpoint · async_saver      save and load; beside the training
checkpoint_folder · resume    whole or not there; damaged ones set aside
reshard · full_weights        shards as boxes of whole tensors; weights gathered on one rank
huggingface_import · huggingface_export   safetensors in and out
"""
