"""Fused forms replace the `forward` of modules, so that one kernel computes several operations of plain layers.

The plain layers define the correct results. `FORMS` maps the `forward` functions of plain layers to forms. A class that
inherits a plain `forward` also gets the form. A class that overrides `forward` stays plain. A module also stays plain
if the form does not support all parts of the module (`Fused.matches`).

Neighbouring forms exchange deferred norms (`NormInput`) and unfinished sums (`PartialSum`). A plain neighbouring layer
gets tensors.

On CUDA, `fuse` replaces all matching modules of a loaded model. `nanovllm show-fused MODEL` lists the replaced modules.
"""

from pkgutil import resolve_name
from typing import Any

from torch import nn

from nanovllm.utils.replace import replace_methods

# module:function of a plain forward -> the form that replaces it
FORMS = {
    "nanovllm.layers.rotary_embedding:RotaryEmbedding.forward": "forms:FusedRotaryEmbedding",
    "nanovllm.vision.mrope:MRotaryEmbedding.forward": "forms:FusedMRotaryEmbedding",
    "nanovllm.layers.layernorm:RMSNorm.forward": "forms:FusedRMSNorm",
    "nanovllm.layers.embed_head:VocabParallelEmbedding.forward": "decoder:FusedEmbedding",
    "nanovllm.layers.embed_head:ParallelLMHead.forward": "decoder:FusedLMHead",
    "nanovllm.delta_net.gated_delta_net:GatedDeltaNet.forward": "delta_net:FusedGatedDeltaNet",
    "nanovllm.moe.experts:Experts.forward": "fused_experts:FusedExperts",
    "nanovllm.moe.experts:MoE.forward": "fused_experts:FusedMoE",
    "nanovllm.models.qwen3:Qwen3Attention.forward": "fused_attention:FusedAttention",
    "nanovllm.models.qwen3:Qwen3MLP.forward": "decoder:FusedMLP",
    "nanovllm.models.qwen3:Qwen3DecoderLayer.forward": "decoder:FusedDecoderLayer",
    "nanovllm.models.qwen3:Qwen3Model.forward": "decoder:FusedModel",
    "nanovllm.models.gemma3_text:Gemma3DecoderLayer.forward": "family_layers:FusedGemma3Layer",
    "nanovllm.models.shared.gemma4_layers:Gemma4DecoderLayer.forward": "family_layers:FusedGemma4Layer",
    "nanovllm.models.gemma4_text:Gemma4Attention.forward": "family_attention:FusedGemma4Attention",
    "nanovllm.models.granite:GraniteDecoderLayer.forward": "family_layers:FusedGraniteLayer",
    "nanovllm.models.smollm3:NoRope.forward": "forms:FusedNoRope",
    "nanovllm.models.glm4:Glm4DecoderLayer.forward": "family_layers:FusedGlm4Layer",
    "nanovllm.models.ministral3:Ministral3Attention.forward": "family_attention:FusedMinistral3Attention",
    "nanovllm.models.olmo3:Olmo3Attention.forward": "family_attention:FusedOlmo3Attention",
    "nanovllm.models.olmo3:Olmo3DecoderLayer.forward": "family_layers:FusedOlmo3Layer",
    "nanovllm.models.shared.gemma4_layers:Gemma4Router.forward": "fused_experts:FusedGemma4Router",
    "nanovllm.models.shared.hybrid:GatedAttention.forward": "fused_attention:FusedGatedAttention",
    "nanovllm.models.shared.hybrid:SharedExpertMoE.forward": "fused_experts:FusedSharedExpertMoE",
    "nanovllm.models.shared.hybrid:HybridLayer.forward": "decoder:FusedHybridLayer",
    "nanovllm.models.shared.head_models:Eagle3Layer.forward": "fused_heads:FusedEagle3Layer",
    "nanovllm.models.shared.head_models:Eagle3Head.forward": "fused_heads:FusedEagle3Head",
    "nanovllm.models.shared.head_models:MtpHead.forward": "fused_heads:FusedMtpHead",
}


def find_form(module: nn.Module) -> str | None:
    """Return the entry of FORMS for a module's `forward`, or None if there is no entry or `forward` is wrapped."""
    forward = getattr(type(module), "forward", None)  # not a function if TorchScript made the module
    key = f"{getattr(forward, '__module__', '')}:{getattr(forward, '__qualname__', '')}"
    if key not in FORMS or resolve_name(key) is not forward or "forward" in vars(module):
        return None
    return FORMS[key]


def form_of(module: nn.Module) -> Any:
    """Return the form that replaces a module's `forward`, or None if the module stays plain.

    The module's submodules must already have their forms.
    """
    home = find_form(module)
    form = home and resolve_name(f"{__name__}.{home}")
    return form if form and form.matches(module) else None


def fuse(model: nn.Module) -> None:
    """In a loaded model, replace the `forward` of every module that has a fused form. Submodules are replaced first."""
    from nanovllm.fused.forms import Fused
    from nanovllm.fused.fused_linear import set_format
    from nanovllm.layers.linear import LinearBase

    seen = set()

    def visit(module: nn.Module) -> None:
        if module in seen or isinstance(module, Fused):  # layers, and even models, may share a rotary embedding
            return
        seen.add(module)
        for part in module.children():
            visit(part)
        if isinstance(module, LinearBase):
            set_format(module)
        elif (form := form_of(module)) is not None:
            replace_methods(module, form, "Fused")
            module.prepare()  # type: ignore[operator]

    visit(model)
