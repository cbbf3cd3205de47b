"""A server of OpenAI's HTTP API on top of AsyncLLM. The package needs jaxspec's extra "serve"."""
