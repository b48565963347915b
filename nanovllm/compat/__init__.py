"""Accepts vLLM's names. The engine imports this package only for settings that it does not know itself."""
