"""Implements the parts of one optimizer step: packed plans, the loss, and what a step reports."""
