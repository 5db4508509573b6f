"""Tries every model of the installed transformers that builds at a tiny size: cut, train a step, compare."""
