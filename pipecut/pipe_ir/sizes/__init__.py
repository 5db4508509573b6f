"""Symbolic sizes: those that the user asks for, decisions of the model's code about them, sizes that do not fit.

Read symbols.py first. The files are imported one by one, because some of them need files of `tracing`,
which needs others of them.
"""
