"""Cut, schedule, size of microbatches and recomputation, searched together."""
