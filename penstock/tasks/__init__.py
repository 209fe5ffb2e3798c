"""Tasks: where prompts come from, and the endless stream that a run takes them from."""
