"""Base class of all schedules: runs a plan on a set of stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import InputError, LossesError
from ..schedule import Op, Plan, Timeline
from ..stage import PipelineStage, StepSeeds
from ..text import counted, numbered
from .agreement import HasAgreement
from .assembly import Assembly, dataflow_of, first_part, forward_part
from .connection import EVAL, STEP, Connection, checked
from .examples import check_options
from .executor import CustomFunction, Observer, checked_op
from .failure import END
from .gradients import AddedLosses, LossTerm, restore_gradients
from .inputs import Given, InputCutter
from .isolation import Isolation
from .last_stage import HasLossScale, results
from .loss import BatchLoss, LossWeight, Objective, weighing_of
from .metrics import Meter, StepMetrics, TokenCounter
from .parameters import HoldsStages
from .random_numbers import checked_kind, with_states
from .runner import LossProbing, Runner
from .state import StepState
from .ties import declared_ties, ties_of_pipe, with_ties
from .transport import TransportOption
from .variants import Forms

_ScheduleT = TypeVar("_ScheduleT", bound="PipelineSchedule")


class PipelineSchedule(HoldsStages, HasAgreement, HasLossScale):
    """Trains and evaluates stages by a plan.

    Every rank makes one with its own stages, and calls `step`. Inputs are needed on the rank of the first stage, the
    target on that of the last. In a process without torch.distributed it takes all stages, and runs all ranks.

    Options:

    - `loss_fn(output, target)`, or `loss_fn(output)` if it takes one argument, makes the loss. Without it the model
      makes its own: its output has a `loss`, as an attribute or a key, or is a tuple that begins with a number, or is a
      number. Labels are then among the model's arguments, and there is no target. If the output holds no loss either,
      `step` runs forwards only and warns; once a step has trained, that is an error.
    - `scale_grads`: a microbatch counts as much as it has samples, so the loss should be a mean over samples. For a sum
      pass False.
    - `loss_weight` returns how much a microbatch counts, for a mean over something else, such as the labels that are
      not ignored. It is a function of the target or, without a loss_fn that takes one, of the arguments by name (those
      of a traced model; of modules that were cut by hand, the keywords on the last stage's rank).
    - `args_chunk_spec`, `kwargs_chunk_spec` and `target_chunk_spec` say in which dim the samples are, if not the first;
      `output_merge_spec` says how outputs are merged.
    - `check_loss`: raise an error for a loss that is NaN.
    - `timeout`: seconds to wait for another rank, in every wait of every step, each counted from where it begins; the
      process group's own timeout holds too, if it is shorter. Ten minutes by default, for a rank may compile in its
      first step: then all others wait for it. Waits of a `transport` of your own are up to that.
    - `ties`: parameters that modules cut by hand share, each a dict from stage to the name of the parameter there.
    - `transport`: "shared_memory" (default on CPUs of a host), "process_group", or a function: `pipecut.run.Transport`.
    - `random_numbers` says what dropout and the like draw from: see below.

    Ranks count their calls, and compare the counts at each. A rank that skips a batch in its loop makes as many calls
    as the others do, only for other batches: set `schedule.step_number` to the number of the batch before each call, on
    every rank, and a step with different batches is an error that names both. It costs no further message.

    Values that are not means over samples, such as how evenly a router of experts spreads a batch, are those of each
    microbatch, as where gradients are accumulated without a pipeline.

    >>> import torch
    >>> from torch import nn
    >>> from pipecut import Schedule1F1B, pipeline
    >>> class Tagger(nn.Module):
    ...     def __init__(self) -> None:
    ...         super().__init__()
    ...         self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 5)
    ...     def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    ...         logits = self.head(self.embed(ids))
    ...         return {"loss": nn.functional.cross_entropy(logits.mT, labels), "logits": logits}
    >>> batch = {"ids": torch.ones(4, 3, dtype=torch.long), "labels": torch.tensor([[2, -100, 4]] * 3 + [[1, 2, 3]])}
    >>> model = Tagger()
    >>> pipe = pipeline(model, (), batch, num_stages=2)
    >>> def how_many(batch: dict[str, Tensor]) -> Tensor:
    ...     return (batch["labels"] != -100).sum()
    >>> stages = [pipe.build_stage(index, "cpu") for index in range(2)]
    >>> output = Schedule1F1B(stages, n_microbatches=2, loss_weight=how_many).step(**batch)
    >>> torch.allclose(output["loss"], model(**batch)["loss"])
    True

    `random_numbers` says what dropout and the like draw from, in forwards and in the loss. By default it is "as_uncut"
    for a traced model that draws random numbers, so that the same seed gives the same losses however it is cut, and
    "per_stage" for others:

    - "per_stage": each stage has a stream of its own for each microbatch of each step. They follow from a seed that
      every rank takes from torch's default generator when a step begins, and of which that of the first stage's rank
      is used. So the numbers follow from `torch.manual_seed()`, the stages and the microbatches, and not from the
      schedule, nor from how many ranks there are. They are not those of the uncut model.
    - "as_uncut": each microbatch has one stream for all stages: the numbers are those of the uncut model that runs one
      microbatch after the other under `pipecut.random_streams()`. The position of a stream goes along from stage to
      stage, some 5 kB for each microbatch; an accelerator waits for it.
    - "per_process": the default generators of each process, in the order in which things run there.

    Whatever it says, backwards draw from the default generators; a checkpoint that runs again draws what it drew.
    """

    _runs_fewer_microbatches = True  # with fewer samples than microbatches

    def __new__(cls: type[_ScheduleT], *args: Any, **kwargs: Any) -> _ScheduleT:
        """Check the keywords first: a misspelt one would be told as another one that is missing."""
        check_options(cls, kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        plan: Plan,
        loss_fn: Callable[..., Tensor] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        check_loss: bool = True,
        timeout: float = 600.0,
        random_numbers: str | None = None,
        loss_weight: LossWeight | None = None,
        target_chunk_spec: Any = None,
        ties: Sequence[Mapping[int, str]] = (),
        transport: TransportOption = None,
    ) -> None:
        self.stages = list(self._checked_stages(stages))
        self.n_microbatches = plan.microbatches
        self.scale_grads = scale_grads
        self.check_loss = check_loss
        self.random_numbers = checked_kind(random_numbers, None)
        self._given_random_numbers = random_numbers
        self._given_ties = ties
        self._transport = transport
        if not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
            raise InputError(f"timeout must be a number of seconds above 0, got {timeout!r}")
        self._timeout = timedelta(seconds=timeout)
        self._merge_spec = output_merge_spec
        self._specs = (args_chunk_spec, kwargs_chunk_spec, target_chunk_spec)
        self._objective = Objective(loss_fn)
        self._probing = LossProbing(self._objective)
        self._loss_weight = loss_weight
        self.seeds = None if random_numbers == "per_process" else StepSeeds()
        # By training, the number of microbatches, and scale_grads, which may be set.
        self._runners: dict[tuple[bool, int, bool, int, bool], Runner] = {}
        self._last_runner: Runner | None = None
        self._custom: dict[Op, CustomFunction] = {}
        self._loss_terms: list[LossTerm] = []
        self._observer: Observer | None = None
        self.count_tokens: TokenCounter | None = None
        self.tracing = False  # True: note the times of actions, for trace()
        self.step_number: int | None = None  # the number of the batch in your loop, which all ranks compare
        self._use(plan)

    @staticmethod
    def _checked_stages(stages: Sequence[PipelineStage]) -> Sequence[PipelineStage]:
        return checked(stages)

    def _use(self, plan: Plan) -> None:
        """Get ready to run a plan: the first one, or another than before."""
        for stage in self.stages:
            stage.use_variant(0)
            stage.find_wrappers()
        self.info = self.stages[0].pipe_info
        self.random_numbers = checked_kind(self._given_random_numbers, self.info)
        declared = declared_ties(self._given_ties, self.stages)
        self.ties = declared if self.info is None else ties_of_pipe(self.info)
        dataflow = with_ties(plan.dataflow, declared) if self.info is None else dataflow_of(self.info)
        self.plan = plan.with_dataflow(with_states(dataflow, self.random_numbers)).validate()
        self._connection = Connection(self.stages, self.plan, self._timeout, self._transport)
        self.in_process = self._connection.in_process
        self._added_losses = AddedLosses(self._loss_terms, self.ties)
        self._isolation = Isolation(self.stages, self._objective.loss_fn, in_process=self.in_process)
        self._weighing = weighing_of(self._loss_weight, self._objective, self.info, self.scale_grads)
        self._forms = Forms(self.info, self.stages, self._connection)
        self._cutter = self._make_cutter()
        self._last_rank = self.plan.placement.rank_of[self.plan.stages - 1]
        self._meter = Meter(self._connection, self.plan, self.stages[0].device)
        self._runners = {}
        self._last_runner = None

    def _make_cutter(self, kind: type[InputCutter] = InputCutter) -> InputCutter:
        return kind(
            self.plan,
            self.info,
            self.stages,
            self._specs,
            self._connection,
            self._objective,
            self._weighing,
            self.seeds,
            self._forms,
            fewer=self._runs_fewer_microbatches,
        )

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a training step: forward and backward of all microbatches, which add to the parameters' `.grad`.

        Returns the output for the whole batch on the last stage's rank, None elsewhere; outputs of earlier stages that
        no stage uses are placeholders (`outputs=` of `pipeline`). Keywords go to the model; modules cut by hand get
        those of their rank that they take. A forward-only plan makes it `eval`. Few samples make fewer microbatches.
        """
        return self._run(
            Given(self.plan.training, args, kwargs, target, loss_kwargs, return_outputs, self._merge_spec, losses)
        )

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run forwards only, without gradients; losses are made if there is a target, or labels.

        The batch may have any number of samples; with fewer than there are microbatches it runs fewer of them.
        The mode of the modules is up to you: call `stage.submod.eval()` before.
        """
        return self._run(Given(False, args, kwargs, target, loss_kwargs, return_outputs, self._merge_spec, losses))

    def __repr__(self) -> str:
        ranks = f"{counted(self.plan.ranks, 'rank')} in this process"
        where = ranks if self.in_process else f"rank {self._connection.ranks[0]} of {self.plan.ranks}"
        here = [stage.stage_index for stage in self.stages]
        which = numbered("stage", here) if len(here) < self.plan.stages else counted(len(here), "stage")
        return f"{type(self).__name__}({which} on {where}, {counted(self.n_microbatches, 'microbatch')})"

    def register_custom_function(self, op: Op | str, function: CustomFunction) -> None:
        """Let `function(action, context)` run all actions of a kind; `context.run(action)` runs one as usual.

        Register on every rank before the first step, for instance for OVERLAP_F_B.
        """
        kind = checked_op(op)
        if self._runners:
            raise InputError("register custom functions before the first step")
        self._custom[kind] = function

    def add_loss(self, loss: LossTerm) -> None:
        """Add a loss of parameters alone, such as a regularisation: a function of a dict of them that returns a number.

        It is called once per training step for each stage, with the stage's parameters by their names in the model, and
        adds to their gradients and to `mean_loss()`. So over all stages a sum over parameters is that over the whole
        model; a tied parameter counts once. Call this on every rank, with the same losses, before the first step.

        >>> from torch import nn
        >>> from pipecut import Schedule1F1B, pipeline
        >>> model, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(4, 2)
        >>> pipe = pipeline(model, (x,), num_stages=2)
        >>> stages = [pipe.build_stage(index, "cpu") for index in range(2)]
        >>> schedule = Schedule1F1B(stages, n_microbatches=2, loss_fn=lambda output: output.sum() * 0)
        >>> schedule.add_loss(lambda named: sum(each.pow(2).sum() for name, each in named.items() if "weight" in name))
        >>> output = schedule.step(x)
        >>> torch.equal(model[1].weight.grad, 2 * model[1].weight)
        True
        """
        if self._runners:
            raise InputError("add losses before the first step")
        self._added_losses.add(loss)

    def check_isolation(self) -> None:
        """Let the next training step raise if a rank uses what stages of other ranks hold, past the values sent.

        On separate ranks the first training step does so anyway. In one process such a step works, and would not on
        ranks: `pipecut.verify` finds out more about that.
        """
        self._isolation.ask()

    def trace(self) -> Timeline:
        """Return the times of the last `step` or `eval` on the ranks of this process, if `tracing` was on."""
        spans = () if self._last_runner is None else tuple(self._last_runner.spans)
        return Timeline(f"{self.plan.name}, executed", self.plan.ranks, spans, "s")

    def mean_loss(self) -> float:
        """Return the loss of the whole batch in the last step or evaluation, on every rank; any of them may call it.

        Where the last stage is under DistributedDataParallel, replicate or fully_shard, it is the mean over all copies
        of the pipeline, as their gradients are averaged; `losses=` of `step` has those of this pipeline alone. After a
        training step it includes the losses of `add_loss`.
        """
        return self._meter.loss.mean()

    def last_step(self) -> StepMetrics:
        """Return the figures of the last step or evaluation, the same on every rank; any of them may call it.

        Tokens are the elements of `input_ids` or, without an argument of that name, of the first argument that is a
        tensor of integers with two dims or more. To count otherwise, set `schedule.count_tokens` on the rank of the
        first stage, a function of the arguments of the step: `lambda **batch: int(batch["attention_mask"].sum())`.

        The time of the step begins when all ranks know the batch. A rank that is neither waiting for another nor
        sending is taken to compute. In one process the ranks take turns, and each waits while the others compute. On
        an accelerator times are those of the device, in the step before this one: no rank waits for its device to
        know them. Peak memory is what the process has had on the device, since it began or called
        `torch.accelerator.reset_peak_memory_stats()`; on a CPU it is its resident memory.

        >>> from torch import nn
        >>> from pipecut import Schedule1F1B, pipeline
        >>> model, ids = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9)), torch.ones(4, 6, dtype=torch.long)
        >>> pipe = pipeline(model, (ids,), num_stages=2)
        >>> stages = [pipe.build_stage(index, "cpu") for index in range(2)]
        >>> schedule = Schedule1F1B(stages, n_microbatches=2, loss_fn=lambda logits: logits.square().mean())
        >>> output = schedule.step(ids)
        >>> last = schedule.last_step()
        >>> last.samples, last.tokens, last.loss == schedule.mean_loss(), len(last.ranks)
        (4, 24, True, 2)
        """
        return self._meter.metrics()

    def _run(self, given: Given) -> Any:
        self._connection.begin_call(STEP if given.training else EVAL, self.step_number)
        try:
            with self._connection.reporting():
                states = self._states(given)
                some = next(iter(states.values()))
                self._meter.begin(some.samples, given, self.count_tokens)
                self._forms.use(some.form, whole=some.whole)
                runner = self._runner(given.training, len(some.samples), some.form, some.whole)
                watching = self._isolation.begin(runner.executors, training=given.training)
            with watching:
                trains = self._run_actions(runner, states, given)  # reports what goes wrong by itself
            self._connection.draws = any(state.draws for state in states.values())
            with self._connection.reporting(END, lambda: restore_gradients(states.values())):
                return self._end(runner, states.get(self._last_rank), given, trains)
        finally:
            self._connection.end_call()

    def _states(self, given: Given) -> Mapping[int, StepState]:
        """Return the state in which each rank that is here begins the step, once all agree on it."""
        if not self._connection.is_ready:
            self._run_handshake()
        self._check_given(given)
        for stage in self.stages:
            stage.check_no_new_wrappers()
            if stage.origin is not None:
                stage.origin.check_unchanged(stage.submod)
        return self._scale_losses(self._cutter.make(given), training=given.training)

    def _run_actions(self, runner: Runner, states: Mapping[int, StepState], given: Given) -> bool:
        """Run the step, and return True if it trained."""
        self._last_runner, runner.tracing = runner, self.tracing
        self._added_losses.begin()
        reported = self._connection.handshake.reported
        if given.training and self._weighing is None and self._probing.is_needed(runner, reported):
            return self._probing.run(runner, states)
        runner.run(states)
        return given.training

    def _end(self, runner: Runner, last: StepState | None, given: Given, trains: bool) -> Any:
        """Return the output on the rank of the last stage, when all ranks have come so far; raise if one has not."""
        output, loss, error = None, BatchLoss(), None
        try:
            if last is not None:
                checks = trains and self.check_loss
                output, loss = results(last, given, self._weighing, scaled=self.scale_grads, check_loss=checks)
            if self._added_losses:
                loss = replace(loss, added=self._added_losses.total(range(self.plan.stages)))
        except Exception as failure:
            error = failure
        self._meter.note(self._connection.agree(error, self._meter.own_figures(loss, runner.turns)))
        return output

    def _run_handshake(self) -> None:
        """Compare with the other ranks what is about to be run."""
        if self.stages[0].origin is not None:
            self.stages[0].origin.check_nothing_added()
        weighs = "no" if self._weighing is None else f"by the {self._weighing.source}"
        options = {"scale_grads": self.scale_grads, "random_numbers": self.random_numbers, "loss_weight": weighs}
        options["losses added by add_loss()"] = len(self._added_losses)
        own = self._probing.fact if self._last_rank in self._connection.ranks else {}
        self._connection.handshake.run(self.plan, self.info, self.ties, self.stages, options, own)
        self._connection.make_ready()

    def _check_given(self, given: Given) -> None:
        """Raise on what a step cannot be called with."""
        if given.training and torch.is_inference_mode_enabled():
            raise InputError(
                "step() needs gradients, and torch.inference_mode() is on here: call it outside, or call eval()"
            )
        if given.losses is not None and not isinstance(given.losses, list):
            raise LossesError(f"losses must be a list, which is filled; got {type(given.losses).__name__}")

    def _runner(self, training: bool, microbatches: int, form: int, whole: bool) -> Runner:
        key = training, microbatches, self.scale_grads, form, whole
        if key not in self._runners:
            info = self._forms.info(form, whole=whole)
            plan = self.plan if microbatches == self.plan.microbatches else first_part(self.plan, microbatches)
            plan = plan if training else forward_part(plan)
            if (form or whole) and info is not None:
                plan = plan.with_dataflow(with_states(dataflow_of(info), self.random_numbers))
            parts = Assembly(
                info,
                self.ties,
                self.stages,
                self._connection,
                self._objective,
                self.scale_grads,
                custom=self._custom,
                random_numbers=self.random_numbers,
                added_losses=self._added_losses,
                observer=self._observer,
            )
            self._runners[key] = parts.runner(plan)
        return self._runners[key]
