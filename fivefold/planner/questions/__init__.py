"""The questions of ``fivefold ask``, each answered with a number, a layout, its memory and its step time.

micro_batch    the largest that fits             fewest_gpus     the fewest ranks that fit
sequence       the longest that fits             largest_model   the largest model that fits
context_length memory and MFU against it         fine_tune       full fine-tuning, LoRA and QLoRA
batches        reasonable global batches         changes         what each single change gains

The numbers come from ``Planner.estimate`` and ``search``. The largest size that fits is found by ``bisection``;
``least_states`` bounds the ranks that can hold a model; ``answer`` has what all questions return, or raise.
"""
