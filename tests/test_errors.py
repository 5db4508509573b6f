"""Messages and names that a terminal or a file shows, whatever a model or a file calls its parts."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipecut import PipeError, pipeline
from pipecut.errors import printable
from pipecut.schedule import Plan, render

NASTY = "<b>&\"'\n\x1b[2J\u202e[bold]"


@given(st.text())
def test_no_text_has_commands_for_a_terminal(text: str) -> None:
    shown = str(PipeError(f"there is no module {text}"))
    assert all(each.isprintable() or each in "\n\t" for each in shown)
    assert shown.encode()  # also half of a pair of surrogates
    assert printable(text, lines=False).isprintable()


def test_a_message_stays_as_it_is() -> None:
    message = "Größe 3 × 4 │ „x“\n  second line\tafter a tab"
    assert str(PipeError(message)) == message


class Named(nn.Module):
    """Two layers under a name that nobody expects."""

    def __init__(self) -> None:
        super().__init__()
        for place in range(2):
            self.add_module(f"{NASTY}{place}", nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def test_names_of_modules_and_plans_are_shown_safely() -> None:
    pipe = pipeline(Named(), (torch.randn(2, 4),), num_stages=2)
    plan = Plan.from_actions([["0F0", "0B0"]], name=NASTY)
    for shown in (str(pipe), repr(pipe), str(pipe.explain()), render.text(plan), render.svg(plan), render.html(plan)):
        assert all(each.isprintable() or each == "\n" for each in shown)
    assert r"\x1b[2J" in str(pipe)
