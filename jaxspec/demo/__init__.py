"""Real weights: plain decoding, n-grams and a draft model side by side."""

from jaxspec.demo.run import MAX_TOKENS, MODEL, Options, demo, say, shipped_draft

__all__ = ["MAX_TOKENS", "MODEL", "Options", "demo", "say", "shipped_draft"]
