"""The Python interface: LLM, AsyncLLM, generate, and the classes of their results."""
