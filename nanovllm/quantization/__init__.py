"""Number formats other than the model's dtype, for weights and for the cache. Each is imported when it is used."""
