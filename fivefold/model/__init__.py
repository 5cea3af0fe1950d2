"""The model: its shape, weights and parameters.

shape · spec · weights   fields; consistent fields with parameter counts; every weight by name and shape
consistency              which fields contradict each other, or are not supported together
latent_attention         multi-head latent attention (DeepSeek)
experts                  mixtures of experts
multi_token_prediction   modules that predict tokens further ahead (DeepSeek-V3)
factors                  factors on tensors, by position, branch or name
activations · norms      one record for each activation function and norm, with the facts that the planner counts
catalog · published      models by name; the keys of published configs
vision · vision_weights  vision towers and projectors of multimodal models, and their weights
adapted                  linear layers by the names that peft has for them
rope                     scaling of rotary positions
hyper_connections        residual streams that are mixed with weights of each token
altup                    a stream of several parts, of which a layer computes one (Gemma 3n)
per_layer_inputs         numbers of a token for each layer (Gemma 3n, Gemma 4)
indexer                  the lightning indexer of sparse latent attention
mixers/                  token mixers other than attention, one module each
huggingface/             reads and writes config.json, names tensors
"""
