"""Times measured by running: the blocks of a chain, forward and both halves of the backward."""
