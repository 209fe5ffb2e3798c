"""vLLM's servers as engines: started and watched here, or joined by their URL."""
