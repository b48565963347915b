"""What only some requests use. A step without such a request carries nothing of it."""
