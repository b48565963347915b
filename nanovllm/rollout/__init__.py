"""What a trainer needs of a running engine: new weights in place, pauses, and its memory while it does not generate.

These functions are methods of LLMEngine.
"""

from nanovllm.rollout.new_weights import load_weights, weights_of
from nanovllm.rollout.pausing import pause, reset_prefix_cache, resume
from nanovllm.rollout.sleep import is_sleeping, sleep, wake_up

__all__ = ["is_sleeping", "load_weights", "pause", "reset_prefix_cache", "resume", "sleep", "wake_up", "weights_of"]
