"""Turns prompts into requests, and tokens into text and events."""
