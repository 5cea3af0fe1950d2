"""Generates text with a trained decoder.

decode   decodes token by token, with a KV cache      source   loads a decoder from a run, a checkpoint or Hugging Face
sample   continues prompts and streams the text
"""
