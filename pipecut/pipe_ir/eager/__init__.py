"""Modules that torch.export cannot trace: each of their calls is one operation of the trace."""
