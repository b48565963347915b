"""Runs one engine behind several HTTP processes, called fronts. See ../README.md."""
