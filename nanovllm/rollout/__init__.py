"""What a trainer needs of a running engine: new weights in place, pauses, and its memory while it does not generate.

These functions are methods of LLMEngine.
"""

from nanovllm.rollout.pausing import pause, reset_prefix_cache, resume
from nanovllm.rollout.sleep import is_sleeping, sleep, wake_up
from nanovllm.rollout.weights import load_weights, weights_of

__all__ = ["is_sleeping", "load_weights", "pause", "reset_prefix_cache", "resume", "sleep", "wake_up", "weights_of"]
