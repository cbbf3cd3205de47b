"""The algorithm of speculative decoding: prefill, one round, and the loop of rounds."""
