"""Exact speculative decoding: several tokens per step, and the same text. docs/speculation.md explains the design."""
