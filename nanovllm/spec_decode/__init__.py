"""Generates several tokens per step by speculative decoding, which never changes the text.

See nanovllm/docs/speculation.md.
"""
