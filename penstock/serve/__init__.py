"""Serves the embedded engine over HTTP: vLLM's token-level API, OpenAI's completions and chat, and control
routes."""
