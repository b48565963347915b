"""Extends the plain engine on CUDA with queued steps, CUDA graphs, and kernel compilation at startup."""
