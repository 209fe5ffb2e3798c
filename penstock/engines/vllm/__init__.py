"""Uses vLLM servers as engines, either started and watched by the run or joined by their URL."""
