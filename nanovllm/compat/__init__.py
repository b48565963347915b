"""Translates vLLM's names to ours. The engine uses `compat` only to translate settings."""
