"""Speculative decoding, which can generate several tokens per step, and never changes the generated text.

See nanovllm/docs/speculation.md.
"""
