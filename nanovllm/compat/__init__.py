"""Translates vLLM's names to ours. The engine uses this package only to translate settings."""
