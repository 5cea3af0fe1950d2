"""Hugging Face models: converts configs of each family to ``Model`` and back, and maps the names of their tensors.

families/                    one module per family: its record of keys, defaults, mapping, tensor names and writing
family · decoder             the record; keys, defaults and names that many families share
config · mapping · rope      a config.json as a validated record; fields of ``Model`` that several families read equally
state_space                  keys, geometry and tensor names of Mamba and Mamba-2 layers
read · keys                  converts a config.json to a model, also of remote code; handling of keys that are not read
remote_code                  classes of remote code that are a family's model under other keys
quantization                 how a checkpoint quantizes its weights, and which it keeps in 16 bits
vision                       reads vision towers and projectors of multimodal configs
write                        converts a model to a config.json
peft                         mixtures whose routed experts peft adapts as parameters
tensors                      maps our weights to tensors of a checkpoint: names, experts, order of rotary rows
model_types                  the model types that transformers knows, and what is missing for those not read
"""
