"""The text part of Gemma 4 12B: a plain decoder. The complete model has no tower for images or audio.

The model has no experts and no per-layer embeddings.
"""

from typing import ClassVar

from nanovllm.models.gemma4_text import Gemma4ForCausalLM


class Gemma4UnifiedForCausalLM(Gemma4ForCausalLM):
    # transformers' defaults
    defaults: ClassVar = Gemma4ForCausalLM.defaults | {
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    }
