"""A module for each format of checkpoints, or of weights that are quantized while loading. `quantization/` finds it."""
