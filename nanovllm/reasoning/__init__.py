"""Tracks the reasoning that a model writes before its answer. README.md explains the design."""
