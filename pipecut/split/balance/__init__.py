"""Balanced cuts of a chain of blocks, on plain numbers."""
