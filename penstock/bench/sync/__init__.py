"""What an update of the weights costs an engine at work: `comparison` runs it all."""
