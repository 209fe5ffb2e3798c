"""The embedded engine behind HTTP: vLLM's token-level dialect, OpenAI's completions and chat, and control."""
