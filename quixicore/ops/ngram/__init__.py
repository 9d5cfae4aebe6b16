"""Hashed n-gram embeddings: ids, gates, and the dilated convolution."""
