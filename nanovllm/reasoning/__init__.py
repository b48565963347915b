"""What a model thinks before it answers, as a state of each sequence. README.md has the design."""
