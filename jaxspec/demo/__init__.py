"""Demonstration: plain and speculative decoding of the embedded model, compared."""
