"""Serves the agents of a training run: OpenAI's API with a key per episode, and a record of every token."""
