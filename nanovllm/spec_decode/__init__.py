"""Exact speculation: several tokens in a step, and the text is the same. docs/speculation.md has the design."""
