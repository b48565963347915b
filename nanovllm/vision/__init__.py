"""Supports images in prompts: contains the vision tower, and prepares its inputs, token positions and cached blocks."""
