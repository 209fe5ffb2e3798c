"""What one optimizer step is made of: packed plans, the loss, and what a step reports."""
