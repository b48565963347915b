"""Images in prompts: the vision tower, its inputs, and the positions and cached blocks of prompts with images."""
