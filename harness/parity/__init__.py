"""Is the engine true to the model's definition? Its log-probabilities against transformers', and against its own."""
