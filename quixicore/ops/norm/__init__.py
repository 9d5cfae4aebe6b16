"""RMS norms, zero-centred and gated."""
