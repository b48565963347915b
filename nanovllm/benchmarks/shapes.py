"""Lists published model shapes, which `--shape NAME` runs with random weights, without a download."""

import json
from pathlib import Path
from typing import Any

from nanovllm.utils.families import MODELS
from nanovllm.vision.vision_config import PUBLISHED, TOWER

# entries of config.json; SHAPES lists the published values in this order
SHAPE_ENTRIES = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta"),
    *("eos_token_id", "tie_word_embeddings"),
)
SHAPES = {
    "qwen3-0.6b": ("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, 40960, 1e-6, 1e6, 151645, True),
    "qwen3-8b": ("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, 40960, 1e-6, 1e6, 151645, False),
    "llama-3.1-8b": ("llama", 4096, 14336, 32, 32, 8, 128, 128256, 131072, 1e-5, 5e5, 128001, False),
    "llama-3.2-1b": ("llama", 2048, 8192, 16, 32, 8, 64, 128256, 131072, 1e-5, 5e5, 128001, True),
    "qwen3-30b-a3b": ("qwen3_moe", 2048, 6144, 48, 32, 4, 128, 151936, 40960, 1e-6, 1e6, 151645, False),
    "qwen3-235b-a22b": ("qwen3_moe", 4096, 12288, 94, 64, 4, 128, 151936, 40960, 1e-6, 1e6, 151645, False),
    "qwen2.5-7b": ("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, 131072, 1e-6, 1e6, 151643, False),
    "mistral-7b": ("mistral", 4096, 14336, 32, 32, 8, 128, 32768, 32768, 1e-5, 1e6, 2, False),  # v0.3
    "gemma3-12b": ("gemma3_text", 3840, 15360, 48, 16, 8, 256, 262208, 131072, 1e-6, 1e6, 1, True),  # its text model
    # only the text part
    "gemma4-31b": ("gemma4_text", 5376, 21504, 60, 32, 16, 256, 262144, 262144, 1e-6, 1e4, 1, True),
    "gemma4-26b-a4b": ("gemma4_text", 2816, 2112, 30, 16, 8, 256, 262144, 262144, 1e-6, 1e4, 1, True),
    "gemma4-e2b": ("gemma4_text", 1536, 6144, 35, 8, 1, 256, 262144, 131072, 1e-6, 1e4, 1, True),
    "ministral3-8b": ("ministral3", 4096, 14336, 34, 32, 8, 128, 131072, 262144, 1e-5, 1e6, 2, False),
    "olmo3-7b": ("olmo3", 4096, 11008, 32, 32, 32, 128, 100278, 65536, 1e-6, 5e5, 100257, False),
    "phi-4": ("phi3", 5120, 17920, 40, 40, 10, 128, 100352, 16384, 1e-5, 2.5e5, 100265, False),
    # with experts in MXFP4
    "gpt-oss-20b": ("gpt_oss", 2880, 2880, 24, 64, 8, 64, 201088, 131072, 1e-5, 1.5e5, 200002, False),
    "gpt-oss-120b": ("gpt_oss", 2880, 2880, 36, 64, 8, 64, 201088, 131072, 1e-5, 1.5e5, 200002, False),
    # published together with a vision tower
    "qwen3.5-9b": ("qwen3_5_text", 4096, 12288, 32, 16, 4, 256, 248320, 262144, 1e-6, 1e7, 248044, False),
    "qwen3.6-27b": ("qwen3_5_text", 5120, 17408, 64, 24, 4, 256, 248320, 262144, 1e-6, 1e7, 248044, False),
    "qwen3-vl-8b": ("qwen3_vl_text", 4096, 12288, 36, 32, 8, 128, 151936, 262144, 1e-6, 5e6, 151645, False),
    "qwen3.5-35b-a3b": ("qwen3_5_moe_text", 2048, 512, 40, 16, 2, 256, 248320, 262144, 1e-6, 1e7, 248044, False),
}
LLAMA_ROPE = dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
OLMO_ROPE = dict(
    rope_type="yarn", factor=8.0, original_max_position_embeddings=8192, attention_factor=1.2079441541679836
)
MINISTRAL_ROPE = dict(
    rope_type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=16384, llama_4_scaling_beta=0.1
)
MINISTRAL_ROPE |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
GPT_OSS = {
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "attention_bias": True,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    },
}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1}
DELTA_HEADS = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "full_attention_interval": 4}
DELTA_HEADS |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
DELTA_HEADS |= {"mamba_ssm_dtype": "float32"}  # dtype of the states
SHARED_EXPERT = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
GEMMA4 = {"final_logit_softcapping": 30.0, "attention_k_eq_v": True, "sliding_window": 1024}
GEMMA4 |= {"hidden_size_per_layer_input": 0}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
# entries that only some shapes have
EXTRA_ENTRIES: dict[str, dict] = {
    "llama-3.1-8b": {"rope_scaling": LLAMA_ROPE | {"factor": 8.0}},
    "llama-3.2-1b": {"rope_scaling": LLAMA_ROPE | {"factor": 32.0}},
    "mistral-7b": {"sliding_window": None},
    "gemma3-12b": {
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma4-31b": GEMMA4 | {"num_global_key_value_heads": 4},
    "gemma4-26b-a4b": GEMMA4 | GEMMA4_EXPERTS | {"num_global_key_value_heads": 2},
    "gemma4-e2b": {
        "final_logit_softcapping": 30.0,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
    },
    "ministral3-8b": {"rope_parameters": MINISTRAL_ROPE},
    "olmo3-7b": {"sliding_window": 4096, "rope_scaling": OLMO_ROPE},
    "gpt-oss-20b": GPT_OSS | {"num_local_experts": 32},
    "gpt-oss-120b": GPT_OSS | {"num_local_experts": 128},
    "qwen3-30b-a3b": EXPERTS | {"moe_intermediate_size": 768, "mlp_only_layers": []},
    "qwen3-235b-a22b": EXPERTS | {"moe_intermediate_size": 1536, "mlp_only_layers": []},
    "qwen3-vl-8b": {"rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]}},
    "qwen3.5-9b": DELTA_HEADS,
    "qwen3.6-27b": DELTA_HEADS | {"linear_num_value_heads": 48},
    "qwen3.5-35b-a3b": DELTA_HEADS | SHARED_EXPERT | {"num_experts": 256, "num_experts_per_tok": 8},
}
# shapes that are also published in FP8, with a scale for each block of weights, and in 4 bits (W4A16)
FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FP8_CONFIG = FP8_BLOCKS | {"modules_to_not_convert": ["lm_head"]}
GROUPS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": False}
W4A16_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUPS, "input_activations": None}},
    "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$", "re:.*in_proj_[ab]$"],
}
for _name in [name for name in SHAPES if name.startswith("qwen3")]:
    for _format, _config in ("fp8", FP8_CONFIG), ("w4a16", W4A16_CONFIG):
        SHAPES[f"{_name}-{_format}"] = SHAPES[_name]
        EXTRA_ENTRIES[f"{_name}-{_format}"] = EXTRA_ENTRIES.get(_name, {}) | {"quantization_config": _config}
IMAGE_TOKENS = "image_pad", "video_pad", "vision_start", "vision_end"
SQUARES = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
PROCESSOR = {  # vLLM needs all entries, although no workload has a video
    "processor_class": "Qwen3VLProcessor",
    "image_processor": {"image_processor_type": "Qwen2VLImageProcessorFast", **SQUARES, **PUBLISHED},
    "video_processor": {"video_processor_type": "Qwen3VLVideoProcessor", **SQUARES},
}
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


def write_shape(name: str, folder: Path, with_text: bool = False, with_tower: bool = False) -> None:
    """Make a model folder without weights: a shape's config.json, and a tokenizer with one token per byte.

    with_text: if True, tokens that are not bytes are decoded to words, because a server does not stream tokens without
        text.
    with_tower: if True, the model also gets the shape's published vision tower, if any.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    entries = dict(zip(SHAPE_ENTRIES, SHAPES[name], strict=True)) | EXTRA_ENTRIES.get(name, {})
    kind = entries["model_type"]
    kind = kind if kind in MODELS else kind.removesuffix("_text")
    architecture = MODELS[kind].split(":")[1]
    folder.mkdir()
    config = {"architectures": [architecture], "torch_dtype": "bfloat16", **entries}
    is_nested = kind != entries["model_type"]  # published together with a vision tower
    special = [f"<|{token}|>" for token in IMAGE_TOKENS] if is_nested and with_tower else []
    if is_nested:
        whole = architecture.replace("CausalLM", "ConditionalGeneration")
        quantized = {name: config.pop(name) for name in ("quantization_config",) if name in config}
        config = {"architectures": [whole], "model_type": kind, "text_config": config, "vision_config": {}, **quantized}
    if special:
        config["vision_config"] = TOWER | {"out_hidden_size": entries["hidden_size"]}
        config |= {f"{token.removesuffix('_pad')}_token_id": 256 + i for i, token in enumerate(IMAGE_TOKENS)}
        (folder / "processor_config.json").write_text(json.dumps(PROCESSOR))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    if with_text:
        characters += [f"\u0120{i:x}" for i in range(len(characters), entries["vocab_size"])]  # a space, and the id
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(characters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))


OF_HEAD = "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"
OF_HEAD += "max_position_embeddings", "rms_norm_eps", "rope_theta"


def write_head(folder: Path, model: Path) -> None:
    """Make a folder with the config.json of an EAGLE-3 head for a shape.

    The head's vocabulary has up to 32,000 tokens.
    """
    entries = json.loads((model / "config.json").read_text())
    layer = {name: entries[name] for name in OF_HEAD} | {"model_type": "llama", "num_hidden_layers": 1}
    layer |= {"architectures": ["LlamaForCausalLMEagle3"], "torch_dtype": "bfloat16"}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(layer | {"draft_vocab_size": min(32000, layer["vocab_size"])}))


def with_drafter(settings: dict[str, Any], model: Path) -> dict[str, Any]:
    """Make a drafter without weights next to the shape's folder `model`, and return `settings` with this drafter.

    In `settings`, "model" may be the name of a shape, and the method "eagle3" needs no "model".
    """
    folder = model.with_name("drafter")
    if settings.get("method") == "eagle3" and settings.get("model") is None:
        write_head(folder, model)
    elif settings.get("model") in SHAPES:
        write_shape(settings["model"], folder)
    else:
        return settings
    return settings | {"model": str(folder)}
