"""The second tier of the KV cache, in pinned host memory."""
