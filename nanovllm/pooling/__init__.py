"""Embeddings, relevance scores and classes of texts: steps compute vectors, not tokens.

See nanovllm/docs/embeddings.md.
"""
