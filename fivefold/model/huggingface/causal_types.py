"""List the causal language models of transformers that are not supported, each with the feature that is missing.

``fivefold models --families`` lists them next to the supported families. Source: modelling code and
``MODEL_FOR_CAUSAL_LM_MAPPING_NAMES`` of transformers 5.23, with which ``tests/model/huggingface/test_causal_types.py``
compares the list.
"""

from __future__ import annotations

# What is missing → model_type of each family that needs it, with the class that transformers builds.
_NEEDED = {
    "its state-space layers (Mamba 1 or 2) share one attention block": """
        zamba ZambaForCausalLM; zamba2 Zamba2ForCausalLM
    """,
    "its layers, or some of them, are recurrent": """
        xlstm xLSTMForCausalLM
    """,
    "an indexer chooses the blocks of keys to which a query attends": "minimax_m3_vl_text MiniMaxM3VLForCausalLM",
    "linear attention, embeddings per layer, embeddings of n-grams, and gated residuals": """
        qwen4_exp Qwen4ExpForCausalLM; qwen4_exp_text Qwen4ExpForCausalLM
    """,
    "it attends to keys of another model, whose tokens it drafts": """
        gemma4_assistant Gemma4AssistantForCausalLM; gemma4_unified_assistant
        Gemma4UnifiedAssistantForCausalLM
    """,
    "relative positions in the scores, and convolutions of keys and values": """
        inkling_text InklingForCausalLM; inkling2_text Inkling2ForCausalLM
    """,
    "passes over one stack of layers that are repeated, and gates on the output of attention": """
        hrm_text HrmTextForCausalLM
    """,
    "convolutions over queries and keys, and a router of several layers": "zaya ZayaForCausalLM",
    "attention to later tokens, and embeddings of languages": "xlm XLMWithLMHeadModel",
    "image patches or images within the text": """
        git GitForCausalLM
    """,
    "layers of cross-attention to images": "mllama MllamaForCausalLM",
    "codebooks of sound instead of a text vocabulary": """
        moshi MoshiForCausalLM; musicgen MusicgenForCausalLM; musicgen_melody MusicgenMelodyForCausalLM
    """,
    "patches of bytes of unequal length": "blt BltForCausalLM",
    "buckets of relative positions": "cpmant CpmAntForCausalLM; xlnet XLNetLMHeadModel",
    "attention within buckets of similar tokens, and reversible layers": "reformer ReformerModelWithLMHead",
    "BERT's encoder layers under a causal mask": """
        bert BertLMHeadModel; bert-generation BertGenerationDecoder; big_bird BigBirdForCausalLM; camembert
        CamembertForCausalLM; data2vec-text Data2VecTextForCausalLM; electra ElectraForCausalLM; ernie
        ErnieForCausalLM; megatron-bert MegatronBertForCausalLM; rembert RemBertForCausalLM; roberta
        RobertaForCausalLM; roberta-prelayernorm RobertaPreLayerNormForCausalLM; roc_bert
        RoCBertForCausalLM; roformer RoFormerForCausalLM; xlm-roberta XLMRobertaForCausalLM; xlm-roberta-xl
        XLMRobertaXLForCausalLM; xmod XmodForCausalLM
    """,
    "it is the decoder of an encoder-decoder model": """
        bart BartForCausalLM; bigbird_pegasus BigBirdPegasusForCausalLM; blenderbot BlenderbotForCausalLM;
        blenderbot-small BlenderbotSmallForCausalLM; marian MarianForCausalLM; mbart MBartForCausalLM; mvp
        MvpForCausalLM; pegasus PegasusForCausalLM; plbart PLBartForCausalLM; prophetnet
        ProphetNetForCausalLM; trocr TrOCRForCausalLM; whisper WhisperForCausalLM
    """,
}
OTHER_NAMES = {"gpt-sw3": "gpt2"}  # model types that are read as another one


def _list_types() -> dict[str, tuple[str, str]]:
    types = {}
    for reason, families in _NEEDED.items():
        for family in families.split(";"):
            model_type, architecture = family.split()
            types[model_type] = (architecture, reason)
    return types


LACKING_TYPES = _list_types()  # model_type → class and what is missing
# The same reasons by model_type and by class, of which several types may have one.
LACKS = {kind: reason for kind, (_, reason) in LACKING_TYPES.items()} | dict(LACKING_TYPES.values())
