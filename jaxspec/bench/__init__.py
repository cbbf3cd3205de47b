"""Benchmarks of the stages of decoding, of whole generations and of requests under load."""
