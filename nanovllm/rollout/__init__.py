"""Lets trainers replace the weights of a running engine, pause the engine, or use its memory while it sleeps.

All functions except `weights_of` are methods of `LLMEngine`, too.
"""

from nanovllm.rollout.new_weights import load_weights, weights_of
from nanovllm.rollout.pausing import pause, reset_prefix_cache, resume
from nanovllm.rollout.sleep import is_sleeping, sleep, wake_up

__all__ = ["is_sleeping", "load_weights", "pause", "reset_prefix_cache", "resume", "sleep", "wake_up", "weights_of"]
