"""Translates vLLM's names to nano-vllm's names. The engine uses `compat` only to translate settings."""
