"""Text from a trained decoder.

decode   token by token, with a KV cache        source   a decoder from a run, a checkpoint or Hugging Face
sample   a look at what a run has learned
"""
