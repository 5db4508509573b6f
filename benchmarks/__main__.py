"""Runs the benchmarks: `python -m benchmarks`, or only one of them: `python -m benchmarks cutting`."""

from __future__ import annotations

import argparse
import logging
import warnings

import torch

from . import backward, balance, checking, checkpoints, cutting, passes, planning, prediction, running, stepping

BENCHMARKS = {
    "cutting": cutting.run,
    "checking": checking.run,
    "running": running.run,
    "planning": planning.run,
    "passes": passes.run,
    "backward": backward.run,
    "stepping": stepping.run,
    "prediction": prediction.run,
    "balance": balance.run,
    "checkpoints": checkpoints.run,
}


def main() -> None:
    """Run the benchmarks that are asked for, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"which: {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="more rounds, less noise (default: %(default)s)")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark called {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    torch.set_num_threads(1)
    # What torch says about itself while it traces would tear the tables apart.
    warnings.filterwarnings("ignore", module="torch|copyreg", category=FutureWarning)
    logging.getLogger("torch").setLevel(logging.ERROR)
    for name in options.names or BENCHMARKS:
        BENCHMARKS[name](options.rounds)


if __name__ == "__main__":
    main()
