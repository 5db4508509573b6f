"""Tracing: run a model once under torch.export, record what it calls, and freeze that as a TracedModel.

Read run.py first, then recorder.py and freeze.py.
"""
