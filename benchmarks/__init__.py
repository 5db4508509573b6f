"""Benchmarks beside the uncut model and beside torch.distributed.pipelining (upstream).

What is compared runs in one process, in turn, on one thread, after a warm-up. A time is CPU time of the process, so
that what else the machine does disturbs it little; a claim is a ratio, the median over the rounds.
"""
