"""Worker processes: how they are launched, supervised and started again."""
