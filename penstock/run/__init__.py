"""Takes a run from its config to its summary: preflight, the parts of a run, and its folder."""
