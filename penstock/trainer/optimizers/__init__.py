"""AdamW over float32 masters, by where its states live: beside the masters, in 8 bits, or in host memory."""
