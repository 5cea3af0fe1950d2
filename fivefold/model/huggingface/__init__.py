"""Hugging Face models: configs of each family to our model and back, and the names of their tensors.

families/                    one module per family: its record of keys, defaults, mapping, tensor names and writing
family · decoder             the record; keys, defaults and names that many families share
config · mapping · rope      a config.json as a checked record; fields of ``Model`` that several families read alike
read · keys                  a config.json as a model; what happens to keys that are not read
write                        a model as a config.json
tensors                      our weights in the tensors of a checkpoint: names, experts, order of rotary rows
model_types · remote_code    what transformers has a class for; files of which it has none
"""
