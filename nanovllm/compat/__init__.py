"""vLLM's vocabulary. The engine imports this room only for a setting that it does not have itself."""
