"""Streams of random numbers: they begin anew from a number, go on from a state, and leave the generators alone."""

from __future__ import annotations

import types

import pytest
import torch
from torch import Tensor

from pipecut import InputError, random_streams
from pipecut.stage.randomness import Generators, RandomStream, StepSeeds, derive_seed


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """The default generator of a device that this machine need not have, numbered 1."""
    default, make = torch.Generator(), torch.Generator

    def get_rng_state(device: torch.device) -> Tensor:
        assert device == torch.device("cuda:1")
        return default.get_state()

    def set_rng_state(state: Tensor, device: torch.device) -> None:
        assert device == torch.device("cuda:1")
        default.set_state(state)

    module = types.SimpleNamespace(get_rng_state=get_rng_state, set_rng_state=set_rng_state)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch, "Generator", lambda device: make())
    return default


def test_a_stream_leaves_the_generator_as_it_was() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with RandomStream(Generators("cpu"), 1):
        torch.rand(5)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_stream_that_ends_in_an_error_leaves_the_generator_as_it_was() -> None:
    before = torch.get_rng_state()

    def draw_and_fail() -> None:
        torch.rand(5)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), RandomStream(Generators("cpu"), 1):
        draw_and_fail()
    assert torch.equal(torch.get_rng_state(), before)


def test_streams_may_be_inside_each_other() -> None:
    generators = Generators("cpu")
    with RandomStream(generators, 1):
        expected = torch.rand(2), torch.rand(2)
    with RandomStream(generators, 1):
        first = torch.rand(2)
        with RandomStream(generators, 2):
            other = torch.rand(2)
        assert torch.equal(torch.stack((first, torch.rand(2))), torch.stack(expected))
    assert not torch.equal(other, expected[0])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_streams_under_modes(mode: type[torch.no_grad]) -> None:
    generators, before = Generators("cpu"), torch.get_rng_state()
    with mode(), RandomStream(generators, 1, keep_end=True) as stream:
        torch.rand(5)
    with RandomStream(generators, stream.end), mode():
        torch.rand(5)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_device_draws_from_the_same_stream_as_the_cpu_beside_it(accelerator: torch.Generator) -> None:
    """The generator of the device is seeded, goes on from a state and is left as it was, like the CPU's."""
    generators = Generators("cuda:1")
    outside = accelerator.get_state()
    with RandomStream(generators, 7, keep_end=True) as stream:
        begun = torch.rand(3, generator=accelerator)
        first = torch.rand(3, generator=accelerator), torch.rand(3)
    assert torch.equal(accelerator.get_state(), outside)
    with RandomStream(generators, stream.end):
        second = torch.rand(3, generator=accelerator), torch.rand(3)
    with RandomStream(generators, 7):
        drawn = [torch.rand(3, generator=accelerator) for _ in range(3)]
        assert torch.equal(torch.stack(drawn), torch.stack((begun, first[0], second[0])))
        assert torch.equal(torch.rand(6), torch.cat((first[1], second[1])))


def test_modules_without_numbers_draw_from_the_cpu_alone() -> None:
    assert Generators("meta").state().numel() == Generators("cpu").state().numel()


def test_seeds_of_a_grid_are_all_different() -> None:
    low_bits = {
        derive_seed(step, stage, microbatch) % 2**32
        for step in range(8)
        for stage in range(8)
        for microbatch in range(8)
    }
    assert len(low_bits) == 512  # the generator of a CPU looks at no more


def test_evaluations_have_no_influence_on_the_seeds_of_steps() -> None:
    torch.manual_seed(0)
    expected = [StepSeeds().next(training=True) for _ in range(2)]
    torch.manual_seed(0)
    seeds = StepSeeds()
    found = []
    for _ in range(2):
        seeds.next(training=False)
        found.append(seeds.next(training=True))
    assert found == expected


def test_there_is_a_stream_for_each_microbatch() -> None:
    drawn = []
    for stream in random_streams(3):
        with stream:
            drawn.append(torch.rand(()).item())
    assert len(set(drawn)) == 3


def test_a_number_of_microbatches_that_cannot_be() -> None:
    with pytest.raises(InputError, match=r"random_streams\(\) got microbatches=0: give as many as the schedule has"):
        random_streams(0)
