"""Symbolic sizes: which may change, what the code decides about them, which are ruled out."""
