"""From a config to a summary: preflight, the parts of a run, and its folder."""
