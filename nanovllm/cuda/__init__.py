"""What CUDA adds to the plain engine: queued steps, CUDA graphs, and the start that compiles and captures them."""
