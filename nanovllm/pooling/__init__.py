"""Embeddings, relevance scores and classes of texts: a step computes vectors instead of tokens. docs/embeddings.md."""
