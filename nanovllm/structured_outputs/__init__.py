"""Restricts answers to JSON, a regular expression, a choice or a grammar. README.md explains the design."""
