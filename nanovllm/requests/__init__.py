"""Turns prompts into requests, and turns tokens into text and events."""
