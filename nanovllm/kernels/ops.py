"""The kernels by name; importing this needs Triton."""
