"""Implements low-rank adapters (LoRA, arXiv:2106.09685) of requests. See nanovllm/docs/lora.md."""
