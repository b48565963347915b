"""Speculative decoding, which generates several tokens per step. It never changes the text.

See nanovllm/docs/speculation.md.
"""
