"""One engine behind separate HTTP processes, the fronts. See ../README.md."""
