# SPDX-License-Identifier: Apache-2.0
"""The steps of a case: a closed set of one-key maps. `step.op` is the key as written, `step.arg` the normalised argument.

Each step knows which requests it mentions (so that a typo is found when the file is read) and which capability it needs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import Discriminator, Field, PositiveInt, Tag

from kvconform.added import Add, AddMany, MultiModal, Natural, OfPrompt, Req, SamePrompt
from kvconform.expectations import Expectation
from kvconform.requirement import Model


class Empty(Model):
    """No argument: `{}`."""


class Run(Model):
    """Until idle, at most `max` engine iterations (None: the driver's limit). With two engines both run, and `until` ends it when that
    request has finished, though its engine may still hold its blocks."""

    max: PositiveInt | None = None
    until: Req | None = None


class Reset(Model):
    """`reset_prefix_cache`: `running` preempts running requests first, `connector` resets the connector's cache too."""

    running: bool = False
    connector: bool = True


class FailLoad(Model):
    """The next load of this request fails at these token positions."""

    req: Req
    positions: list[Natural] | Literal["all"] = "all"


@lru_cache(maxsize=64)
def _key_of(kind: type[BaseStep]) -> tuple[str, str]:
    """The one field of a kind of steps: its name, and the key of the map."""
    name, field = next(iter(kind.model_fields.items()))
    return name, field.alias or name


class BaseStep(Model):
    """A map with one key, the operation."""

    @property
    def op(self) -> str:
        return _key_of(type(self))[1]

    @property
    def arg(self) -> Any:
        return getattr(self, _key_of(type(self))[0])

    @property
    def needs(self) -> str | None:
        """The capability that the step implies."""
        return None

    def mentions(self) -> set[str]:
        """The requests that it refers to, without the one that it adds."""
        return set()

    def adds(self) -> list[Add]:
        """The requests that it adds."""
        return []


def _add_form(value: Any) -> str:
    return "many" if isinstance(value, AddMany) or (isinstance(value, dict) and "count" in value) else "one"


class AddStep(BaseStep):
    add: Annotated[Annotated[Add, Tag("one")] | Annotated[AddMany, Tag("many")], Discriminator(_add_form)]

    def mentions(self) -> set[str]:
        return self.add.mentions() if isinstance(self.add, Add) else set()

    def adds(self) -> list[Add]:
        return [self.add] if isinstance(self.add, Add) else self.add.each()


class StepStep(BaseStep):
    """n engine iterations: schedule, execute, update; async as vLLM's engine core does with its batch queue."""

    step: PositiveInt


class RunStep(BaseStep):
    run: Run

    def mentions(self) -> set[str]:
        return {self.run.until} if self.run.until else set()


class OnStep(BaseStep):
    """Which engine the steps from here on are about, where there are two."""

    on: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]


class ScheduleStep(BaseStep):
    """n times schedule and execute; the outputs stay in the queue."""

    schedule: PositiveInt


class LandStep(BaseStep):
    """Process the n oldest queued outputs."""

    land: PositiveInt


class AbortStep(BaseStep):
    abort: Req

    def mentions(self) -> set[str]:
        return {self.abort}


class GrammarStep(BaseStep):
    """The grammar of this request has been compiled; until then it was not admitted."""

    grammar: Req

    def mentions(self) -> set[str]:
        return {self.grammar}


class PreemptStep(BaseStep):
    """Forced, between steps."""

    preempt: Req

    def mentions(self) -> set[str]:
        return {self.preempt}


class DropLocalStep(BaseStep):
    """Reset the local prefix cache only."""

    drop_local: Empty = Field(alias="drop-local")


class ResetStep(BaseStep):
    reset: Reset


class IdleStep(BaseStep):
    """n steps without work."""

    idle: PositiveInt


class RestartStep(BaseStep):
    """Shut the connector halves down and build new ones over the same store."""

    restart: Literal["engine", "process"]


class ShutdownStep(BaseStep):
    """Shut down, twice."""

    shutdown: Empty


class FailLoadStep(BaseStep):
    fail_load: FailLoad = Field(alias="fail-load")

    @property
    def needs(self) -> str | None:
        return "fault_injection"

    def mentions(self) -> set[str]:
        return {self.fail_load.req}


class LookupOnlyStep(BaseStep):
    """A scheduling attempt that asks the connector but gets no memory."""

    lookup_only: Req = Field(alias="lookup-only")

    def mentions(self) -> set[str]:
        return {self.lookup_only}


class ReorderStep(BaseStep):
    """Reverse the running batch."""

    reorder: Empty


class PauseStep(BaseStep):
    """The scheduler takes no new requests until `resume`."""

    pause: Empty


class ResumeStep(BaseStep):
    resume: Empty


class ExpectStep(BaseStep):
    """An expectation at this point."""

    expect: Expectation

    def mentions(self) -> set[str]:
        return self.expect.mentions()


STEPS: dict[str, type[BaseStep]] = {
    "add": AddStep, "on": OnStep, "step": StepStep, "run": RunStep, "schedule": ScheduleStep, "land": LandStep, "abort": AbortStep,
    "grammar": GrammarStep, "preempt": PreemptStep,
    "drop-local": DropLocalStep, "reset": ResetStep, "idle": IdleStep, "restart": RestartStep,
    "shutdown": ShutdownStep, "fail-load": FailLoadStep, "lookup-only": LookupOnlyStep, "reorder": ReorderStep, "pause": PauseStep,
    "resume": ResumeStep, "expect": ExpectStep,
}  # fmt: skip


def _op(value: Any) -> str | None:
    """Which step a map is: its key. Also for instances, so that models can be validated again."""
    if isinstance(value, BaseStep):
        return value.op
    return next(iter(value)) if isinstance(value, dict) and len(value) == 1 else None


if TYPE_CHECKING:
    Step = BaseStep
else:
    Step = Annotated[
        Union[tuple(Annotated[model, Tag(name)] for name, model in STEPS.items())],  # noqa: UP007
        Discriminator(
            _op,
            custom_error_type="unknown_step",
            custom_error_message="a step is a map with one key, one of: " + ", ".join(STEPS),
        ),
    ]


def one_by_one(steps: list[Step]) -> list[Step]:
    """The steps with every `add` of many requests replaced by as many `add`s of one."""
    plain: list[Step] = []
    for step in steps:
        if isinstance(step, AddStep) and isinstance(step.add, AddMany):
            plain.extend(AddStep(add=add) for add in step.adds())
        else:
            plain.append(step)
    return plain


__all__ = ["STEPS", "Add", "MultiModal", "OfPrompt", "Req", "SamePrompt", "Step", "one_by_one"]
