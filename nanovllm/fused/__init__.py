"""Fused forms: several operations of plain layers as one kernel. They replace the `forward` of modules that match.

The plain layers say what is computed, and each form computes the same. `FORMS` is the table: whatever its family, a
module matches by the function that is its `forward`, so a class that inherits a plain `forward` gets the fused one, and
a class that has another stays plain. So does a module with a part that the form does not know (`Fused.matches`). Fused
neighbours pass each other norms that are not computed yet (NormInput) and sums that are not added up yet (PartialSum);
plain ones get tensors.

CUDA replaces all modules of a model that match, when it is loaded. fused/README.md says what the forms save, and
`nanovllm show-fused MODEL` lists what is replaced.
"""

from pkgutil import resolve_name
from typing import Any

from torch import nn

from nanovllm.utils.replace import replace_methods

# module:function of a plain forward -> the form in its place
FORMS = {
    "nanovllm.layers.rotary_embedding:RotaryEmbedding.forward": "forms:FusedRotaryEmbedding",
    "nanovllm.layers.layernorm:RMSNorm.forward": "forms:FusedRMSNorm",
    "nanovllm.layers.embed_head:VocabParallelEmbedding.forward": "decoder:FusedEmbedding",
    "nanovllm.layers.embed_head:ParallelLMHead.forward": "decoder:FusedLMHead",
    "nanovllm.delta_net.gated_delta_net:GatedDeltaNet.forward": "delta_net:FusedGatedDeltaNet",
    "nanovllm.moe.experts:MoE.forward": "fused_experts:FusedMoE",
    "nanovllm.models.qwen3:Qwen3Attention.forward": "fused_attention:FusedAttention",
    "nanovllm.models.qwen3:Qwen3MLP.forward": "decoder:FusedMLP",
    "nanovllm.models.qwen3:Qwen3DecoderLayer.forward": "decoder:FusedDecoderLayer",
    "nanovllm.models.qwen3:Qwen3Model.forward": "decoder:FusedModel",
    "nanovllm.models.hybrid:GatedAttention.forward": "fused_attention:FusedGatedAttention",
    "nanovllm.models.hybrid:SharedExpertMoE.forward": "fused_experts:FusedSharedExpertMoE",
    "nanovllm.models.hybrid:HybridLayer.forward": "decoder:FusedHybridLayer",
    "nanovllm.models.head_models:Eagle3Layer.forward": "fused_heads:FusedEagle3Layer",
    "nanovllm.models.head_models:Eagle3Head.forward": "fused_heads:FusedEagle3Head",
    "nanovllm.models.head_models:MtpHead.forward": "fused_heads:FusedMtpHead",
}


def find_form(module: nn.Module) -> str | None:
    """The value of FORMS for a module's forward, whatever its parts are; None for another forward, or a wrapped one."""
    forward = getattr(type(module), "forward", None)  # of a module that TorchScript made, it is no function
    key = f"{getattr(forward, '__module__', '')}:{getattr(forward, '__qualname__', '')}"
    if key not in FORMS or resolve_name(key) is not forward or "forward" in vars(module):
        return None
    return FORMS[key]


def form_of(module: nn.Module) -> Any:
    """The form that takes the place of a module's forward; None: it stays plain. Its parts must be replaced already."""
    home = find_form(module)
    form = home and resolve_name(f"{__name__}.{home}")
    return form if form and form.matches(module) else None


def fuse(model: nn.Module) -> None:
    """Replace the forward of each module of a loaded model that has a fused form, parts before the whole."""
    from nanovllm.fused.forms import Fused
    from nanovllm.fused.fused_linear import set_format
    from nanovllm.layers.linear import LinearBase

    seen = set()

    def visit(module: nn.Module) -> None:
        if module in seen or isinstance(module, Fused):  # layers, and even models, may share the rotary embedding
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
