"""Models: configurations, the decoder, its parameters, and its passes over a paged KV cache."""
