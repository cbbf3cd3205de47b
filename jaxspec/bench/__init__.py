"""Benchmarks of the stages of decoding, of whole generations, and of many requests under load."""
