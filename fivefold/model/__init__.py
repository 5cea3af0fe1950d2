"""The model: its shape, weights and parameters.

shape · spec · weights   fields; fields with parameter counts; every weight by name and shape
activations · norms      one record each, with what is counted of it
catalog                  named models
huggingface/             configs read and written, names of tensors
"""
