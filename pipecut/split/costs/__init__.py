"""What the steps of a trace cost: operations, bytes, memory, and the time that these take on a machine."""
