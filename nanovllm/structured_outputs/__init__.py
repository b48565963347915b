"""Answers of a given form: JSON, a regular expression, a choice or a grammar. README.md explains the design."""
