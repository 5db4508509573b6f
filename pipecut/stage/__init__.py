"""What one stage does with values: microbatches, forward, backward."""
