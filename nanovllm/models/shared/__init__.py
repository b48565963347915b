"""Code that several families share: base classes, draft heads, and the search for a family."""
