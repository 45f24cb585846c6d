"""The HTTP server: OpenAI's API over an AsyncLLM. Nothing outside this folder needs its dependencies."""
