"""Sparse attention: an indexer scores blocks of keys, and attention reads the tokens of the best."""
