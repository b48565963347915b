"""vLLM's vocabulary. The engine imports this package only for a setting that it does not have itself."""
