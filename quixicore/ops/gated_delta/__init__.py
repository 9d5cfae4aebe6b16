"""Gated DeltaNet: convolution, gates, and the recurrence by steps and by chunks."""
