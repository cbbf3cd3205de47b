"""Sampling: the distribution of the next token, and random draws from that distribution."""
