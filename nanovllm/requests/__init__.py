"""Between callers and the scheduler: prompts become requests, and tokens become text and events."""
