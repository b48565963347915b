"""What a trainer needs of a running engine: new weights in place, and a pause while they change.

`LLM.load_weights`, `LLM.pause` and `LLM.resume` import this folder when they are called.
"""

from nanovllm.rollout.pausing import pause, reset_prefix_cache, resume
from nanovllm.rollout.weights import load_weights, weights_of

__all__ = ["load_weights", "pause", "reset_prefix_cache", "resume", "weights_of"]
