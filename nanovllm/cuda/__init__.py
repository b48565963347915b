"""What CUDA adds to the plain engine: steps that are queued and captured in graphs, and their start."""
