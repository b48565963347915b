"""Implements the commands `nanovllm generate`, `nanovllm chat` and `nanovllm completion`."""
