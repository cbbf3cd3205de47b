"""Demonstration: plain and speculative decoding of the model that is embedded in the package, compared."""
