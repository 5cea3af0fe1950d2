"""The model: its shape, weights and parameters.

shape · spec · weights   fields; fields with parameter counts; every weight by name and shape
catalog                  named models
huggingface/             configs read and written, names of tensors
"""
