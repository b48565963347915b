"""Translates vLLM's names to ours. The engine uses this package for nothing but settings."""
