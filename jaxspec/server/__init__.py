"""OpenAI's HTTP API, served by an AsyncLLM. Needs jaxspec's extra "serve"."""
