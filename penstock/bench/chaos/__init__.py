"""`penstock chaos`: the demo while its processes are killed and frozen at random, and an audit of what came out."""
