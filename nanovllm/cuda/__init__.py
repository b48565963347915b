"""CUDA's additions to the plain engine: queued steps, CUDA graphs, and a start that compiles and captures."""
