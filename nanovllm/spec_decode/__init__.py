"""Speculative decoding, which generates several tokens per step, and never changes the text.

See nanovllm/docs/speculation.md.
"""
