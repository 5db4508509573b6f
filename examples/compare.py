"""Puts a pipe beside the uncut model: the same call to both, and how far apart the results are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from pipecut import Pipe

Loss = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Check:
    """One thing that has to be the same, and what was found."""

    what: str
    passed: bool
    found: str


def check_training_run(pipe: Pipe, uncut: nn.Module, inputs: Tensor, loss: Loss, seed: int = 0) -> Iterator[Check]:
    """Forward and backward of both, with the same random numbers: the outputs and every gradient, by name."""
    expected = _forward_and_backward(uncut, uncut, inputs, loss, seed)
    actual = _forward_and_backward(pipe, pipe.traced.model, inputs, loss, seed)
    yield check_values("output, bit for bit", {"output": actual}, {"output": expected})
    yield check_values("gradients, by name", gradients_of_stages(pipe), gradients(uncut))


def _forward_and_backward(
    run: Callable[[Tensor], Tensor], holder: nn.Module, inputs: Tensor, loss: Loss, seed: int
) -> Tensor:
    holder.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    output = run(inputs)
    loss(output).backward()
    return output.detach()


def check_forward(what: str, pipe: Pipe, uncut: nn.Module, inputs: Tensor, seed: int = 0) -> Check:
    """The outputs of a further call."""
    outputs = []
    for run in (pipe, uncut):
        torch.manual_seed(seed)
        with torch.no_grad():
            outputs.append({"output": run(inputs)})
    return check_values(what, *outputs)


def check_state(pipe: Pipe, uncut: nn.Module) -> Check:
    """The stages' state_dicts together: the names of the uncut model, no more and no fewer, and its values."""
    together = {name: tensor for stage in pipe.stages for name, tensor in stage.state_dict().items()}
    return check_values("state_dict, all stages", together, uncut.state_dict())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of a model's parameters."""
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.grad is not None
    }


def gradients_of_stages(pipe: Pipe) -> dict[str, Tensor]:
    """The gradients of all stages' parameters."""
    return {name: gradient for stage in pipe.stages for name, gradient in gradients(stage).items()}


def check_values(what: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Check:
    """The same names, and the same tensors under them, bit for bit."""
    if actual.keys() != expected.keys():
        return Check(what, False, f"names differ: {', '.join(sorted(actual.keys() ^ expected.keys()))}")
    shapes = [name for name in expected if actual[name].shape != expected[name].shape]
    if shapes:
        return Check(what, False, f"shape differs: {', '.join(shapes)}")
    worst_name = max(expected, key=lambda name: worst_difference(actual[name], expected[name]))
    worst = worst_difference(actual[worst_name], expected[worst_name])
    where = f" at {worst_name}" if worst else ""
    count = f"{len(expected)} tensor{'s' if len(expected) > 1 else ''}"
    return Check(what, worst == 0, f"{count}, worst difference {worst:g}{where}")


def worst_difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference of two elements; infinite where one of them is not a number."""
    if torch.equal(actual, expected):
        return 0.0
    difference = (actual.double() - expected.double()).abs()
    return float(difference.nan_to_num(nan=float("inf")).max())


def report(console: Console, checks: list[Check]) -> bool:
    """Print the checks; whether all of them passed."""
    table = Table(title="beside the uncut model", title_justify="left")
    table.add_column("what")
    table.add_column("same?")
    table.add_column("found")
    for check in checks:
        table.add_row(check.what, "[green]yes[/]" if check.passed else "[bold red]NO[/]", check.found)
    console.print(table)
    return all(check.passed for check in checks)
