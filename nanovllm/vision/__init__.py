"""Images in prompts: the vision tower, its inputs, the positions of tokens, and cached blocks."""
