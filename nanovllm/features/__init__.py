"""What only some requests use. A step without such a request imports and carries nothing of it."""
