"""Translates vLLM's names to ours. The engine uses this subpackage only to translate settings."""
