"""OpenAI's HTTP interface over AsyncLLM. Needs jaxspec's extra "serve"."""
