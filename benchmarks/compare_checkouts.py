"""Compares the step time of two checkouts of pipecut, in turn within one run.

    python -m benchmarks.compare_checkouts /path/to/before /path/to/after

Stages are overhead-bound: tiny layers, so that what is measured is the schedule itself. Each checkout has processes of
its own, which wait while those of the other run. In every round each side runs a few steps; the ratio is the median
over the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, cast

CASES = (("1F1B", 1, 1), ("Interleaved1F1B", 2, 1), ("1F1B", 1, 2), ("Interleaved1F1B", 2, 2))  # chunks, processes
MICROBATCHES, WIDTH, ROWS, STEPS = 16, 16, 4, 5

WORKER = """
import os, sys, time, warnings
import torch, torch.distributed as dist
from torch import nn
import pipecut
warnings.simplefilter("ignore")
torch.set_num_threads(1)
name, chunks, rank, processes, store, microbatches, width, rows, steps = sys.argv[1:]
chunks, rank, processes, microbatches, width, rows, steps = map(
    int, (chunks, rank, processes, microbatches, width, rows, steps))
stages = 2 * chunks
if processes > 1:
    dist.init_process_group("gloo", store=dist.FileStore(store, processes), rank=rank, world_size=processes)
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()) for _ in range(stages)]
held = range(stages) if processes == 1 else range(rank, stages, processes)
made = [pipecut.PipelineStage(layers[index], index, stages, "cpu") for index in held]
options = {"ranks": 2} if processes == 1 and chunks > 1 else {}
kind = pipecut.get_schedule_class(name)
schedule = kind(made if len(made) > 1 else made[0], microbatches, nn.functional.mse_loss, **options)
x, y = torch.randn(2, rows * microbatches, width)
args = (x,) if 0 in held else ()
target = {"target": y} if stages - 1 in held else {}
for _ in range(3):
    schedule.step(*args, **target)
print("ready", flush=True)
for line in sys.stdin:
    if processes > 1:
        dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        schedule.step(*args, **target)
    print((time.perf_counter() - begin) / steps, flush=True)
"""


class Side:
    """The processes of one checkout for one case."""

    def __init__(self, checkout: Path, name: str, chunks: int, processes: int, directory: str) -> None:
        store = str(Path(directory) / f"{checkout.name}-{name}-{processes}-{id(self)}")
        sizes = list(map(str, (MICROBATCHES, WIDTH, ROWS, STEPS)))
        env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        self.workers = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER, name, str(chunks), str(rank), str(processes), store, *sizes],
                cwd=checkout, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(processes)
        ]  # fmt: skip
        for worker in self.workers:
            assert cast(IO[str], worker.stdout).readline() == "ready\n", f"{checkout} failed"

    def measure(self) -> float:
        """Run a few steps, and return the seconds of one."""
        for worker in self.workers:
            cast(IO[str], worker.stdin).write("go\n")
            cast(IO[str], worker.stdin).flush()
        return max(float(cast(IO[str], worker.stdout).readline()) for worker in self.workers)

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers:
            cast(IO[str], worker.stdin).close()
            worker.wait()


def main() -> None:
    """Compare two checkouts, and print a line for each case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_checkouts", description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=40, help="more rounds, less noise (default: %(default)s)")
    options = parser.parse_args()
    for name, chunks, processes in CASES:
        with tempfile.TemporaryDirectory() as directory:
            paths = (options.before.resolve(), options.after.resolve())
            sides = [Side(path, name, chunks, processes, directory) for path in paths]
            times: list[list[float]] = [[], []]
            for nth in range(options.rounds):
                for which in (0, 1) if nth % 2 else (1, 0):
                    times[which].append(sides[which].measure())
            for side in sides:
                side.close()
        ratio = statistics.median(after / before for before, after in zip(*times, strict=True))
        before, after = (1000 * statistics.median(each) for each in times)
        where = "one process" if processes == 1 else f"{processes} ranks"
        print(f"{name}, {where}: {before:.1f} ms before, {after:.1f} ms after, ratio {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
