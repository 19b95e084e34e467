# SPDX-License-Identifier: Apache-2.0
"""The steps of a case: a closed set of one-key maps. `step.op` is the key as written, `step.arg` the normalised argument.

Each step knows which requests it mentions (so that a typo is found when the file is read) and which capability it needs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, PositiveInt, Tag

from kvconform.expectations import Expectation
from kvconform.requirement import Model

Req = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", description="a request's name within the case")]
Natural = Annotated[int, Field(ge=0)]


class SamePrompt(Model):
    """The prompt of another request."""

    same: Req


class OfPrompt(Model):
    """The first `tokens` tokens of another request (its whole prompt if absent; with `outputs` its output too), `then` new ones."""

    of: Req
    tokens: PositiveInt | None = None
    outputs: bool = False
    then: Natural = 0


def _prompt_form(value: Any) -> str:
    if isinstance(value, SamePrompt) or (isinstance(value, dict) and "same" in value):
        return "same"
    return "of" if isinstance(value, (OfPrompt, dict)) else "length"


Prompt = Annotated[
    Annotated[PositiveInt, Tag("length")] | Annotated[SamePrompt, Tag("same")] | Annotated[OfPrompt, Tag("of")],
    Discriminator(_prompt_form),
]


class MultiModal(Model):
    """An image or the like at token `at` of the prompt, `length` tokens long; `id` decides whether two are the same."""

    at: Natural
    length: PositiveInt
    id: str


class Add(Model):
    """A new request. `prompt`: its length in tokens, or another request. `drafts`: drafts accepted per verify step, the last repeats."""

    req: Req
    prompt: Prompt
    max_tokens: PositiveInt = 4
    salt: str | None = None
    lora: str | None = None
    mm: list[MultiModal] = []
    priority: int = 0
    params: dict[str, Any] = Field(default={}, description="kv_transfer_params")
    drafts: list[Natural] | None = None
    stop_at: Natural | None = Field(default=None, description="output index at which the stop token is sampled")
    skip_reading_prefix_cache: bool = False
    reloads: Req | None = Field(default=None, description="repeats this request's content: its lookup says how much of it came back")
    id: str | None = Field(default=None, description="the client's request id; the same id twice is id reuse")

    def mentions(self) -> set[str]:
        """The other requests that it refers to."""
        found = {self.reloads} if self.reloads else set()
        if isinstance(self.prompt, SamePrompt):
            found.add(self.prompt.same)
        elif isinstance(self.prompt, OfPrompt):
            found.add(self.prompt.of)
        return found


class AddMany(Model):
    """`count` requests named req0, req1, ...; lists are cycled through."""

    req: Req
    count: PositiveInt
    prompt: PositiveInt | list[PositiveInt]
    max_tokens: PositiveInt | list[PositiveInt] = 4
    drafts: list[Natural] | None = None

    def each(self) -> list[Add]:
        """The requests one by one."""

        def pick(value: int | list[int], index: int) -> int:
            return value[index % len(value)] if isinstance(value, list) else value

        return [
            Add(req=f"{self.req}{i}", prompt=pick(self.prompt, i), max_tokens=pick(self.max_tokens, i), drafts=self.drafts)
            for i in range(self.count)
        ]


class Empty(Model):
    """No argument: `{}`."""


class Run(Model):
    """Until idle, at most `max` engine iterations (None: the driver's limit)."""

    max: PositiveInt | None = None


class Reset(Model):
    """`reset_prefix_cache`: `running` preempts running requests first, `connector` resets the connector's cache too."""

    running: bool = False
    connector: bool = True


class FailLoad(Model):
    """The next load of this request fails at these token positions."""

    req: Req
    positions: list[Natural] | Literal["all"] = "all"


class _Step(Model):
    """A map with one key, the operation."""

    @property
    def op(self) -> str:
        field = next(iter(type(self).model_fields.items()))
        return field[1].alias or field[0]

    @property
    def arg(self) -> Any:
        return getattr(self, next(iter(type(self).model_fields)))

    @property
    def needs(self) -> str | None:
        """The capability that the step implies."""
        return None

    def mentions(self) -> set[str]:
        """The requests that it refers to, without the one that it adds."""
        return set()


def _add_form(value: Any) -> str:
    return "many" if isinstance(value, AddMany) or (isinstance(value, dict) and "count" in value) else "one"


class AddStep(_Step):
    add: Annotated[Annotated[Add, Tag("one")] | Annotated[AddMany, Tag("many")], Discriminator(_add_form)]

    def mentions(self) -> set[str]:
        return self.add.mentions() if isinstance(self.add, Add) else set()


class StepStep(_Step):
    """n engine iterations: schedule, execute, update; async as vLLM's engine core does with its batch queue."""

    step: PositiveInt


class RunStep(_Step):
    run: Run


class ScheduleStep(_Step):
    """n times schedule and execute; the outputs stay in the queue."""

    schedule: PositiveInt


class LandStep(_Step):
    """Process the n oldest queued outputs."""

    land: PositiveInt


class AbortStep(_Step):
    abort: Req

    def mentions(self) -> set[str]:
        return {self.abort}


class PreemptStep(_Step):
    """Forced, between steps."""

    preempt: Req

    def mentions(self) -> set[str]:
        return {self.preempt}


class DropLocalStep(_Step):
    """Reset the local prefix cache only."""

    drop_local: Empty = Field(alias="drop-local")


class ResetStep(_Step):
    reset: Reset


class IdleStep(_Step):
    """n steps without work."""

    idle: PositiveInt


class RestartStep(_Step):
    """Shut the connector halves down and build new ones over the same store."""

    restart: Literal["engine", "process"]


class ShutdownStep(_Step):
    """Shut down, twice."""

    shutdown: Empty


class FailLoadStep(_Step):
    fail_load: FailLoad = Field(alias="fail-load")

    @property
    def needs(self) -> str | None:
        return "fault_injection"

    def mentions(self) -> set[str]:
        return {self.fail_load.req}


class LookupOnlyStep(_Step):
    """A scheduling attempt that asks the connector but gets no memory."""

    lookup_only: Req = Field(alias="lookup-only")

    def mentions(self) -> set[str]:
        return {self.lookup_only}


class ReorderStep(_Step):
    """Reverse the running batch."""

    reorder: Empty


class PauseStep(_Step):
    """The scheduler takes no new requests until `resume`."""

    pause: Empty


class ResumeStep(_Step):
    resume: Empty


class ExpectStep(_Step):
    """An expectation at this point."""

    expect: Expectation

    def mentions(self) -> set[str]:
        return self.expect.mentions()


STEPS: dict[str, type[_Step]] = {
    "add": AddStep, "step": StepStep, "run": RunStep, "schedule": ScheduleStep, "land": LandStep, "abort": AbortStep,
    "preempt": PreemptStep, "drop-local": DropLocalStep, "reset": ResetStep, "idle": IdleStep, "restart": RestartStep,
    "shutdown": ShutdownStep, "fail-load": FailLoadStep, "lookup-only": LookupOnlyStep, "reorder": ReorderStep, "pause": PauseStep,
    "resume": ResumeStep, "expect": ExpectStep,
}  # fmt: skip


def _op(value: Any) -> str | None:
    """Which step a map is: its key. Also for instances, so that models can be validated again."""
    if isinstance(value, _Step):
        return value.op
    return next(iter(value)) if isinstance(value, dict) and len(value) == 1 else None


def _bare(value: Any) -> Any:
    """`- shutdown` is `- shutdown: {}`."""
    return {value: {}} if isinstance(value, str) and value in STEPS else value


Step = Annotated[
    Annotated[AddStep, Tag("add")]
    | Annotated[StepStep, Tag("step")]
    | Annotated[RunStep, Tag("run")]
    | Annotated[ScheduleStep, Tag("schedule")]
    | Annotated[LandStep, Tag("land")]
    | Annotated[AbortStep, Tag("abort")]
    | Annotated[PreemptStep, Tag("preempt")]
    | Annotated[DropLocalStep, Tag("drop-local")]
    | Annotated[ResetStep, Tag("reset")]
    | Annotated[IdleStep, Tag("idle")]
    | Annotated[RestartStep, Tag("restart")]
    | Annotated[ShutdownStep, Tag("shutdown")]
    | Annotated[FailLoadStep, Tag("fail-load")]
    | Annotated[LookupOnlyStep, Tag("lookup-only")]
    | Annotated[ReorderStep, Tag("reorder")]
    | Annotated[PauseStep, Tag("pause")]
    | Annotated[ResumeStep, Tag("resume")]
    | Annotated[ExpectStep, Tag("expect")],
    Discriminator(
        _op,
        custom_error_type="unknown_step",
        custom_error_message="a step is a map with one key, one of: " + ", ".join(STEPS),
    ),
    BeforeValidator(_bare),
]


def one_by_one(steps: list[Step]) -> list[Step]:
    """The steps with every `add` of many requests replaced by as many `add`s of one."""
    plain: list[Step] = []
    for step in steps:
        if isinstance(step, AddStep) and isinstance(step.add, AddMany):
            plain.extend(AddStep(add=add) for add in step.add.each())
        else:
            plain.append(step)
    return plain


__all__ = ["STEPS", "Add", "MultiModal", "OfPrompt", "Req", "SamePrompt", "Step", "one_by_one"]
