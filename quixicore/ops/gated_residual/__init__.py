"""Several residual streams: mixed into a layer's input, combined with its output."""
