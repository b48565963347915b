"""A module for each format: of checkpoints, and those that are made while loading. `quantization/` finds them."""
