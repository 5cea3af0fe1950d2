"""Multimodal models around a text model of any family: only that model is read."""

from __future__ import annotations

from fivefold.model.huggingface.family import Wrapper

# The class of each, the family of its text model if the file does not say, and whether its embeddings are tied then.
# Source: configuration classes of transformers 5.23. PaliGemma is not among them: its tokens attend in both directions.
_WRAPPERS = """
    aria AriaForConditionalGeneration aria_text
    aya_vision AyaVisionForConditionalGeneration cohere2 tied
    cohere2_vision Cohere2VisionForConditionalGeneration cohere2 tied
    deepseek_vl DeepseekVLForConditionalGeneration llama tied
    deepseek_vl_hybrid DeepseekVLHybridForConditionalGeneration llama tied
    exaone4_5 Exaone4_5_ForConditionalGeneration exaone4
    fast_vlm FastVlmForConditionalGeneration qwen2
    fuyu FuyuForCausalLM persimmon
    got_ocr2 GotOcr2ForConditionalGeneration qwen2 tied
    hyperclovax_vision_v2 HyperCLOVAXVisionV2ForConditionalGeneration hyperclovax tied
    idefics2 Idefics2ForConditionalGeneration mistral
    idefics3 Idefics3ForConditionalGeneration llama
    internvl InternVLForConditionalGeneration qwen2 tied
    janus JanusForConditionalGeneration llama tied
    kimi_k25 Kimi_K25ForConditionalGeneration deepseek_v3 tied
    lfm2_vl Lfm2VlForConditionalGeneration lfm2 tied
    lighton_ocr LightOnOcrForConditionalGeneration qwen3 tied
    llava LlavaForConditionalGeneration llama
    llava_next LlavaNextForConditionalGeneration llama
    llava_next_video LlavaNextVideoForConditionalGeneration llama
    llava_onevision LlavaOnevisionForConditionalGeneration qwen2
    minicpm_ocr MiniCPMOcrForConditionalGeneration qwen3_5_text tied
    minicpmv4_6 MiniCPMV4_6ForConditionalGeneration qwen3_5_text
    minicpmv4_7 MiniCPMV4_7ForConditionalGeneration qwen3_5_text
    moss_transcribe_diarize MossTranscribeDiarizeForConditionalGeneration qwen3 tied
    ovis2 Ovis2ForConditionalGeneration qwen2 tied
    perception_lm PerceptionLMForConditionalGeneration llama
    pp_chart2table GotOcr2ForConditionalGeneration qwen2 tied
    qianfan_ocr QianfanOCRForConditionalGeneration qwen3
    smolvlm SmolVLMForConditionalGeneration llama
    video_llama_3 VideoLlama3ForConditionalGeneration qwen2
    video_llava VideoLlavaForConditionalGeneration llama
    vipllava VipLlavaForConditionalGeneration llama
"""


def _read_wrapper(line: str) -> Wrapper:
    model_type, architecture, text, *tied = line.split()
    return Wrapper(model_type, architecture, text, tied=bool(tied), any_text=True)


WRAPPERS = tuple(_read_wrapper(line) for line in _WRAPPERS.strip().splitlines())
