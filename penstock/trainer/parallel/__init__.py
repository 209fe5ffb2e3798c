"""Several processes that train one model: how ranks are laid out, and one file for each kind of parallelism."""
