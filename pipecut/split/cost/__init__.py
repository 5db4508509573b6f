"""Costs of traced operations: FLOPs, bytes, memory, and their time on a machine."""
