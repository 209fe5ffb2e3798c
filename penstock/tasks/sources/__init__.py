"""Task sources, one a file. Each has `load(name, config) -> list[Task]`."""
