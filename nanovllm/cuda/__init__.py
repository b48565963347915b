"""CUDA's additions to the plain engine: queued steps, CUDA graphs, and kernel compilation at startup."""
