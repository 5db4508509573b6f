"""Cuts of a chain of blocks, on plain numbers: what is asked, the exact min-max cut, and cuts of chunked pipelines."""
