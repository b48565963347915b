"""Computes embeddings, relevance scores and classes of texts. Steps compute vectors instead of tokens.

See nanovllm/docs/embeddings.md.
"""
