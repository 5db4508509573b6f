"""Tracing: run a model once under torch.export, record what it calls, and freeze that as a TracedModel.

Read run.py first, then recorder.py and freeze.py; tracer.py is the entry. The files are imported one by one,
because some of them need `sizes` and `eager`, which need others of them.
"""
