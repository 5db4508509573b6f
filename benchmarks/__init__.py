"""Benchmarks beside the uncut model and beside torch.distributed.pipelining (upstream).

What is compared runs in one process, in turn, on one thread, after a warm-up. A time is CPU time of the process, so
that what else the machine does disturbs it little; a claim is a ratio, the median over the rounds.

A benchmark is a module with `run(rounds) -> list[Goal]`, and its name and seconds in `BENCHMARKS` of `__main__.py`. It
prints its tables by `show_table`, and ends with `return show_goals([Goal(what, value, limit), ...])`, which prints
its goals and returns them. A generator does as well: what it yielded is kept if its time runs out. Each benchmark runs
in a process of its own, which is ended after its seconds; `time_left()` is what is left of them, `in_turn` heeds it.
At the end one table has the goals of all, met or missed; `Goal(..., reason=...)` says there why one may be missed.

`make bench` runs those of the goals in less than 20 minutes; `make bench ARGS=--all` the others too, and
`make bench ARGS="cutting balance"` these two.
"""
