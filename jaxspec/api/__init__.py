"""Python interface: LLM, AsyncLLM, generate, and the outputs that they return."""
