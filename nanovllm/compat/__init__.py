"""Translates vLLM's names to ours. The engine uses this only to translate settings."""
