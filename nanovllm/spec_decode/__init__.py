"""Exact speculative decoding: several tokens per step, and unchanged text. docs/speculation.md explains the design."""
