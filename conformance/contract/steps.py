# SPDX-License-Identifier: Apache-2.0
"""The steps of a case: a closed set of one-key maps, and their arguments.

`step.op` is the key as written, `step.arg` the normalised argument. Each step knows the capability
it needs and the requests it mentions, so that a typo is found when the file is read.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import BeforeValidator, Discriminator, Field, PositiveInt, Tag, model_validator

from kvconform.contract.expectations import Expectation
from kvconform.contract.requirement import Model
from kvconform.errors import did_you_mean

Req = Annotated[
    str, Field(pattern=r"^[a-z][a-z0-9_]*$", description="a request's name within the case")
]
Natural = Annotated[int, Field(ge=0)]


class SamePrompt(Model):
    """The prompt of another request, with `above` added to every token id."""

    same: Req
    above: Natural = 0


class OfPrompt(Model):
    """The first `tokens` tokens of another request, followed by `then` new tokens.

    Without `tokens`, its whole prompt. With `outputs`, its output counts too.
    """

    of: Req
    tokens: PositiveInt | None = None
    outputs: bool = False
    then: Natural = 0


class TakenPart(Model):
    """`tokens` tokens of another request's prompt, from token `start` (`from` in YAML)."""

    of: Req
    start: Natural = Field(default=0, alias="from")
    tokens: PositiveInt


class NewPart(Model):
    """New tokens."""

    new: PositiveInt


def _part_form(value: Any) -> str:
    is_new = isinstance(value, NewPart) or (isinstance(value, dict) and "new" in value)
    return "new" if is_new else "taken"


Part = Annotated[
    Annotated[NewPart, Tag("new")] | Annotated[TakenPart, Tag("taken")], Discriminator(_part_form)
]


class PartsPrompt(Model):
    """Parts of other prompts and new tokens, in this order, followed by `then` new tokens.

    For example, a prompt that differs from another one at its start and agrees with it later.
    """

    parts: list[Part] = Field(min_length=1)
    then: Natural = 0


def _prompt_form(value: Any) -> str | None:
    for form, kind in (("same", SamePrompt), ("parts", PartsPrompt), ("of", OfPrompt)):
        if isinstance(value, kind) or (isinstance(value, dict) and form in value):
            return form
    return None if isinstance(value, dict | list) else "length"


Prompt = Annotated[
    Annotated[PositiveInt, Tag("length")]
    | Annotated[SamePrompt, Tag("same")]
    | Annotated[OfPrompt, Tag("of")]
    | Annotated[PartsPrompt, Tag("parts")],
    Discriminator(
        _prompt_form,
        custom_error_type="prompt_form",
        custom_error_message="must be a number of tokens, or a map with same, of or parts",
    ),
]


class Lora(Model):
    """A LoRA adapter. Adapters with another name or path have other weights.

    `number` is the engine's own; it differs between engines and may be used again after a restart.
    """

    name: str
    path: str | None = Field(default=None, description="default: /adapters/NAME")
    number: PositiveInt | None = Field(
        default=None, description="default: computed from the letters of the name"
    )


def _lora(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


LoraOrName = Annotated[Lora, BeforeValidator(_lora, json_schema_input_type=str | Lora)]


class Alike(Model):
    """Digits of the identifier of item `id` that another item's identifier has, too.

    Identifiers are 64 hexadecimal digits. `first` and `last` count from both ends.
    """

    id: str
    first: Annotated[int, Field(ge=0, le=63)] = 0
    last: Annotated[int, Field(ge=0, le=63)] = 0


class MultiModal(Model):
    """An image or the like at token `at` of the prompt, `length` tokens long.

    Two with the same `id` have the same content. The identifier that the connector sees is made of
    `id`, like the hash of an image; `alike` gives it some digits of another one.
    """

    at: Natural
    length: PositiveInt
    id: str
    alike: Alike | None = None


class Embeds(Model):
    """A prompt given as embeddings, without token ids.

    Row n is that of content `of`, or from row `until` on that of content `then`. With `rows`, only
    the first of them are given as embeddings; the others are token ids, as in a chat.
    """

    of: str
    until: PositiveInt | None = None
    then: str | None = None
    rows: PositiveInt | None = None

    @model_validator(mode="after")
    def _both(self) -> Embeds:
        if (self.until is None) != (self.then is None):
            raise ValueError("embeds: `until` and `then` belong together")
        return self

    def parts(self, length: int) -> list[tuple[str, int, int]]:
        """Return (content, first row, end) of each part of a prompt of `length` tokens."""
        length = min(length, self.rows or length)
        if self.until is None or self.then is None or self.until >= length:
            return [(self.of, 0, length)]
        return [(self.of, 0, self.until), (self.then, self.until, length)]


def _embeds(value: Any) -> Any:
    return {"of": value} if isinstance(value, str) else value


EmbedsOrContent = Annotated[Embeds, BeforeValidator(_embeds, json_schema_input_type=str | Embeds)]


class Handed(Model):
    """The kv_transfer_params that request `of` ended with.

    `alter` changes values, so that the parameters refer to something that does not exist.
    """

    of: Req
    alter: dict[str, Any] = {}


def _handed(value: Any) -> Any:
    return {"of": value} if isinstance(value, str) else value


HandedFrom = Annotated[Handed, BeforeValidator(_handed, json_schema_input_type=Req | Handed)]


class Add(Model):
    """A new request.

    `prompt`: its length in tokens, another request, or parts of others. `drafts`: the drafts that
    each verify step accepts; the last number repeats.
    """

    req: Req
    prompt: Prompt
    max_tokens: PositiveInt = 4
    salt: str | None = None
    lora: LoraOrName | None = None
    mm: list[MultiModal] = []
    embeds: EmbedsOrContent | None = Field(
        default=None,
        description="the prompt is given as embeddings: of this content, and without token ids",
    )
    priority: int = 0
    params: dict[str, Any] = Field(default={}, description="kv_transfer_params")
    skip_save: bool = Field(
        default=False,
        description="forbid to store its KV, by the entry that the capability skip_save names",
    )
    hand_over: bool = Field(
        default=False,
        description="ask for a hand-over of its KV, as a proxy asks a prefill engine",
    )
    handed: HandedFrom | None = Field(
        default=None,
        description="kv_transfer_params that this request of the other engine ended with",
    )
    drafts: list[Natural] | None = None
    stop_at: Natural | None = Field(
        default=None, description="output index at which the stop token is sampled"
    )
    repeats_at: Natural | None = Field(
        default=None,
        description="output index from which one token repeats, which vLLM is to detect as a"
        " repetition of two; engine vllm only",
    )
    skip_reading_prefix_cache: bool = False
    structured: bool = Field(
        default=False,
        description="has a grammar, whose compilation ends at step `grammar`; engine vllm only",
    )
    session: bool = Field(
        default=False,
        description="gets more input at step `continue`, until that ends it; engine vllm only",
    )
    reloads: Req | None = Field(
        default=None,
        description="repeats this request's content, so that its lookup shows how much is reused",
    )
    id: str | None = Field(
        default=None, description="the client's request id; the same id twice is id reuse"
    )

    @property
    def identity(self) -> dict[str, Any]:
        """What tells it apart from other requests with the same tokens."""
        return {
            "salt": self.salt,
            "adapter": self.lora.model_dump() if self.lora else None,
            "items": [item.model_dump(exclude={"alike"}) for item in self.mm],
            "embeds": self.embeds.model_dump() if self.embeds else None,
        }

    def mentions(self) -> set[str]:
        """Return the other requests that it refers to."""
        found = {self.reloads} if self.reloads else set()
        if isinstance(self.prompt, SamePrompt):
            found.add(self.prompt.same)
        elif isinstance(self.prompt, OfPrompt):
            found.add(self.prompt.of)
        elif isinstance(self.prompt, PartsPrompt):
            found.update(part.of for part in self.prompt.parts if isinstance(part, TakenPart))
        if self.handed is not None:
            found.add(self.handed.of)
        return found


class AddMany(Model):
    """`count` requests, named `req` plus a number from 0; lists are cycled through."""

    req: Req
    count: PositiveInt
    prompt: PositiveInt | list[PositiveInt]
    max_tokens: PositiveInt | list[PositiveInt] = 4
    drafts: list[Natural] | None = None

    def each(self) -> list[Add]:
        """Return the requests one by one."""

        def pick(value: int | list[int], index: int) -> int:
            return value[index % len(value)] if isinstance(value, list) else value

        return [
            Add(
                req=f"{self.req}{i}",
                prompt=pick(self.prompt, i),
                max_tokens=pick(self.max_tokens, i),
                drafts=self.drafts,
            )
            for i in range(self.count)
        ]


class Empty(Model):
    """No argument: `{}`."""


class Run(Model):
    """Iterate until the engine is idle, or `max` steps have computed, loaded or released something.

    `max`: None is the driver's limit. With several engines all run. `until` ends the step when that
    request has finished, even if its engine still holds its blocks; `loaded`, when the engine has
    heard that its asynchronous load is over, before it is admitted with what was loaded, or when it
    runs without one.
    """

    max: PositiveInt | None = None
    until: Req | None = None
    loaded: Req | None = None


class Reset(Model):
    """Arguments of `reset_prefix_cache`.

    `running` preempts running requests first; `connector` resets the connector's cache too.
    """

    running: bool = False
    connector: bool = True


class Continue(Model):
    """More input of a session: `then` new tokens; 0 ends the session.

    vLLM drops the tokens whose KV is not computed, that is the last one that it sampled, and makes
    all other output a part of the prompt. Places in `mm` are counted from the first new token; with
    it, the turn before ends first.
    """

    req: Req
    then: Natural
    max_tokens: PositiveInt = 4
    mm: list[MultiModal] = []

    @model_validator(mode="after")
    def _fits(self) -> Continue:
        if any(item.at + item.length > self.then for item in self.mm):
            raise ValueError("mm: an item ends behind the new tokens; make `then` larger")
        return self


class Soak(Model):
    """Rounds that are repeated, in each of three thirds.

    What the connector holds must not grow over identical rounds. With `fresh`, each round has
    prompts of its own; what comes back of a new prompt must not become less.
    """

    rounds: PositiveInt = 6
    fresh: bool = False


class Shutdown(Model):
    """How the engine is shut down: once, or twice (`again`)."""

    again: bool = False


class FailLoad(Model):
    """The request whose next load fails, and the token positions at which it fails.

    `rank`: only what that rank has stored is lost. What other ranks compute upon such a load is
    wrong in the later stages and, of the ranks of its stage, in those that are driven after it: the
    one that samples is the last one.
    """

    req: Req
    positions: list[Natural] | Literal["all"] = "all"
    rank: Natural | None = None


@lru_cache(maxsize=64)
def _key_of(kind: type[BaseStep]) -> tuple[str, str]:
    """Return the name of the one field of a kind of step, and the key of the map."""
    name, field = next(iter(kind.model_fields.items()))
    return name, field.alias or name


class BaseStep(Model):
    """A map with one key, the operation."""

    @property
    def op(self) -> str:
        """The key as written."""
        return _key_of(type(self))[1]

    @property
    def arg(self) -> Any:
        """The normalised argument."""
        return getattr(self, _key_of(type(self))[0])

    @property
    def needs(self) -> str | None:
        """The capability that the step requires."""
        return None

    def mentions(self) -> set[str]:
        """Return the requests that it refers to, without those that it adds."""
        return set()

    def adds(self) -> list[Add]:
        """Return the requests that it adds."""
        return []


def _add_form(value: Any) -> str:
    many = isinstance(value, AddMany) or (isinstance(value, dict) and "count" in value)
    return "many" if many else "one"


class AddStep(BaseStep):
    """Add requests."""

    add: Annotated[
        Annotated[Add, Tag("one")] | Annotated[AddMany, Tag("many")], Discriminator(_add_form)
    ]

    def mentions(self) -> set[str]:
        """Return the requests that the added one refers to."""
        return self.add.mentions() if isinstance(self.add, Add) else set()

    def adds(self) -> list[Add]:
        """Return the added requests."""
        return [self.add] if isinstance(self.add, Add) else self.add.each()


class OnStep(BaseStep):
    """Drive this one of several engines from here on."""

    on: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]


class StepStep(BaseStep):
    """Do n engine iterations: schedule, execute, update.

    With async scheduling as vLLM's engine core does it with its batch queue.
    """

    step: PositiveInt


class RunStep(BaseStep):
    """Iterate until the engine is idle."""

    run: Run

    def mentions(self) -> set[str]:
        """Return the requests that end the step."""
        return {req for req in (self.run.until, self.run.loaded) if req}


class ScheduleStep(BaseStep):
    """Schedule and execute n times; the outputs stay in the queue.

    If it is full, its oldest one is processed first, as the engine core does.
    """

    schedule: PositiveInt


class LandStep(BaseStep):
    """Process the n oldest queued outputs."""

    land: PositiveInt


class AbortStep(BaseStep):
    """Abort a request."""

    abort: Req

    def mentions(self) -> set[str]:
        """Return the request."""
        return {self.abort}


class GrammarStep(BaseStep):
    """Finish compiling the grammar of a request, which is not admitted before."""

    grammar: Req

    def mentions(self) -> set[str]:
        """Return the request."""
        return {self.grammar}


class ContinueStep(BaseStep):
    """Give a session more input, as a client that streams its input does."""

    continue_: Continue = Field(alias="continue")

    def mentions(self) -> set[str]:
        """Return the request."""
        return {self.continue_.req}


class PreemptStep(BaseStep):
    """Preempt a request, between steps."""

    preempt: Req

    def mentions(self) -> set[str]:
        """Return the request."""
        return {self.preempt}


class DropLocalStep(BaseStep):
    """Reset the local prefix cache only."""

    drop_local: Empty = Field(alias="drop-local")


class ResetStep(BaseStep):
    """Call `reset_prefix_cache`."""

    reset: Reset


class Idle(Model):
    """A number of steps, over which `seconds` pass on the virtual clock."""

    steps: PositiveInt
    seconds: Annotated[float, Field(ge=0)] = 0


def _idle(value: Any) -> Any:
    return {"steps": value} if isinstance(value, int) else value


class IdleStep(BaseStep):
    """Do n steps without work; `{steps, seconds}`: meanwhile, time passes."""

    idle: Annotated[Idle, BeforeValidator(_idle, json_schema_input_type=PositiveInt | Idle)]


DType = Literal["float32", "float16", "bfloat16"]
CacheDType = Literal["auto", "float16", "bfloat16", "fp8", "fp8_e5m2"]
ONE_BYTE = ("fp8", "fp8_e5m2")
"""The quantised ones. vLLM gives both tensors of bytes."""
Layout = Literal["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]


class Otherwise(Model):
    """What a new engine has otherwise than the one before it.

    The fields are those of `config`. `layout`, `kernel_block_size`: another attention backend.
    """

    tensor_parallel: Literal[1, 2] | None = None
    pipeline_parallel: Literal[1, 2] | None = None
    context_parallel: Literal[1, 2, 3, 4] | None = Field(
        default=None, description="ranks that a block's tokens are split over"
    )
    context_interleave: PositiveInt | None = Field(
        default=None, description="tokens in a row that one of them holds"
    )
    dtype: DType | None = Field(default=None, description="of the model, and so of its KV")
    cache_dtype: CacheDType | None = Field(
        default=None, description="of the KV cache, if it is not the model's"
    )
    model: str | None = Field(
        default=None, description="name of another model of the same sizes, whose KV is another"
    )
    revision: str | None = Field(default=None, description="other weights of the same model")
    quantization: str | None = Field(default=None, description="of the model's weights")
    hf_overrides: dict[str, Any] | None = Field(
        default=None, description="changes of the model's configuration"
    )
    block_size: PositiveInt | None = None
    num_blocks: PositiveInt | None = Field(
        default=None, description="as where another amount of memory is free"
    )
    kernel_block_size: PositiveInt | None = Field(
        default=None, description="tokens per block of the KV tensors"
    )
    layout: Layout | None = Field(
        default=None, description="the only order of a KV tensor's axes that is supported"
    )

    @model_validator(mode="after")
    def _something(self) -> Otherwise:
        if not self.model_fields_set:
            raise ValueError("restart: say what the new engine has otherwise")
        return self


class Killed(Model):
    """The process is killed in the midst of a save: the first one after the steps before."""

    killed_at: float = Field(
        gt=0,
        lt=1,
        description="after this share of the calls that the last save before has made; where files "
        "were seen half-written in that save, in the midst of that",
    )


class RestartStep(BaseStep):
    """Shut the connector's halves down, and build new ones over the same store.

    `engine`: in the same process. `another-engine`: as `engine`, and the new one has another engine
    id, as engines do that are configured without one. If a case has three restarts, all of these
    two kinds, what each shutdown leaves in the process is compared. `process`: in another process,
    which is forked and so has the same hash seed and addresses. `interpreter`: the first part runs
    in a fresh interpreter with another hash seed; vLLM's block hashes stay the same.
    `{context_parallel: 4}`, `{dtype: float16}`, `{model: other/model}`: as `process`, and with
    another configuration. `settings`: as `process`, and with the connector's options for it (the
    setting `extra_config_after_restart`). `{killed_at: 0.5}`: as `process`, and the first one is
    killed while it saves.
    """

    restart: (
        Literal["engine", "another-engine", "process", "interpreter", "settings"]
        | Otherwise
        | Killed
    )


class ShutdownStep(BaseStep):
    """Shut the engine down."""

    shutdown: Shutdown


class FailLoadStep(BaseStep):
    """Make the next load of a request fail."""

    fail_load: FailLoad = Field(alias="fail-load")

    @property
    def needs(self) -> str | None:
        """The capability to make loads fail."""
        by_rank = self.fail_load.rank is not None
        return "fault_injection and fault_injection_by_rank" if by_rank else "fault_injection"

    def mentions(self) -> set[str]:
        """Return the request."""
        return {self.fail_load.req}


Files = Literal["removed", "truncated", "longer", "garbage"]
"""What happens to files."""
NOTHING_TO_DAMAGE = (
    "the connector has no files in {tmp} (extra_config), and no values on a server that can be"
    " asked to damage them (`damage` in [[servers]])"
)
"""What is said when there is nothing to damage."""
NOTHING_TO_FILL = "the connector has no files in {tmp} (extra_config)"
"""What is said when no disk can be full."""
DISK_FULL = "disk full"
"""What a trace says of a disk that is full."""


class Damage(Model):
    """What happens to what the connector has stored: to its files, its servers, or its disk."""

    files: Files | None = Field(
        default=None,
        description="of every file in the run's directory ({tmp} of extra_config), and of every"
        " value on a server that has a command for it; garbage has the length of the file",
    )
    every: PositiveInt = Field(
        default=1,
        description="only one in so many files, in the order of their paths: the last of each; on a"
        " server, all values",
    )
    servers: Literal["stopped"] | None = None
    disk: Literal["full"] | None = Field(
        default=None,
        description="from then on, the process can write no file beyond half the length of the"
        " largest in the run's directory: values are cut short, and short ones are still written",
    )

    @model_validator(mode="after")
    def _one(self) -> Damage:
        if [self.files, self.servers, self.disk].count(None) != 2:
            raise ValueError("damage is one of `files`, `servers` and `disk`")
        if self.every > 1 and self.files is None:
            raise ValueError("damage: `every` is about `files`")
        return self

    @property
    def what(self) -> str:
        """What happens, in a word."""
        return self.files or self.servers or DISK_FULL


class Control(Model):
    """What an operator asks the connector's controller to do with the content of request `of`.

    That is its prompt and its output. `to`: the level that it is moved to.
    """

    do: Literal["lookup", "clear", "move", "pin", "unpin", "compress"]
    of: Req
    to: Literal["first", "last"] | None = None

    @model_validator(mode="after")
    def _a_place_to_move_to(self) -> Control:
        if (self.do == "move") != (self.to is not None):
            raise ValueError("control: `move` needs `to`, and nothing else has it")
        return self


class ControlStep(BaseStep):
    """Ask the connector's controller for something. The engine knows nothing of it."""

    control: Control

    @property
    def needs(self) -> str | None:
        """The operation of the controller."""
        operation = "pin" if self.control.do == "unpin" else self.control.do
        return f"'{operation}' in cap.controller"

    def mentions(self) -> set[str]:
        """Return the request."""
        return {self.control.of}


class DamageStep(BaseStep):
    """Damage what the connector has stored, once it has been granted its next load.

    A disk is full until the end of the run, or of its process.
    """

    damage: Damage

    @property
    def needs(self) -> str | None:
        """The capability to store."""
        return "store"


class LookupOnlyStep(BaseStep):
    """Attempt to schedule a request that gets no memory after the connector's lookup."""

    lookup_only: Req = Field(alias="lookup-only")

    def mentions(self) -> set[str]:
        """Return the request."""
        return {self.lookup_only}


class ReorderStep(BaseStep):
    """Reverse the running batch."""

    reorder: Empty


class PauseStep(BaseStep):
    """Admit no new requests until `resume`."""

    pause: Empty


class ResumeStep(BaseStep):
    """Admit new requests again."""

    resume: Empty


class SoakStep(BaseStep):
    """Repeat all steps so far in identical rounds, and compare what each connector holds.

    A round has the prompts of the first one, under other request ids.
    """

    soak: Soak


class ExpectStep(BaseStep):
    """Check an expectation at this point."""

    expect: Expectation

    def mentions(self) -> set[str]:
        """Return the requests of the expectation."""
        return self.expect.mentions()


STEPS: dict[str, type[BaseStep]] = {_key_of(kind)[1]: kind for kind in BaseStep.__subclasses__()}
"""The kinds of step by key, in the order of their definition."""


def _op(value: Any) -> str | None:
    """Return the key of a step, written as a map; or of an instance, which is validated again."""
    if isinstance(value, BaseStep):
        return value.op
    return next(iter(value)) if isinstance(value, dict) and len(value) == 1 else None


def _exists(value: Any) -> Any:
    """Return a value. ValueError if its key is that of no step, with a step that is close to it."""
    if isinstance(value, str) and value in STEPS:
        raise ValueError(f"a step is a map: write `{value}: {{...}}`, or `{value}: {{}}`")
    op = _op(value)
    if isinstance(op, str) and op not in STEPS:
        known = f"; the steps are {', '.join(STEPS)}"
        raise ValueError(f"there is no step {op!r}{did_you_mean(op, STEPS, 1) or known}")
    return value


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
        BeforeValidator(_exists),
    ]


UNREPEATABLE = ("soak", "restart", "shutdown", "damage", "continue")
"""Steps that cannot come before `soak`."""


def restarts_process(step: Step) -> bool:
    """Return whether what follows the step runs in another process than what is before it."""
    return step.op == "restart" and step.arg not in ("engine", "another-engine")


def forks(step: Step) -> bool:
    """Return whether what is before the step runs in a forked process."""
    return restarts_process(step) and step.arg != "interpreter"


def changes_settings(step: Step) -> bool:
    """Return whether the connector has other options after the step."""
    return step.op == "restart" and step.arg == "settings"


def repeated(step: Step, number: int, *, fresh: bool = False) -> Step:
    """Return a step as it is in round `number`: with other names, and the same prompts.

    With `fresh`, with prompts of its own, which have in common what those of the case have.
    """

    def named(req: str) -> str:
        return f"{req}_{number}"

    def renewed(prompt: Prompt) -> Prompt:
        if isinstance(prompt, SamePrompt):
            return SamePrompt(same=named(prompt.same))
        if isinstance(prompt, OfPrompt):
            return prompt.model_copy(update={"of": named(prompt.of)})
        if isinstance(prompt, PartsPrompt):
            parts = [
                part.model_copy(update={"of": named(part.of)})
                if isinstance(part, TakenPart)
                else part
                for part in prompt.parts
            ]
            return prompt.model_copy(update={"parts": parts})
        return prompt

    if isinstance(step, AddStep) and isinstance(step.add, Add):
        add = step.add
        changes: dict[str, Any] = {
            "req": named(add.req),
            "prompt": renewed(add.prompt) if fresh else SamePrompt(same=add.req),
            "id": add.id and named(add.id),
            "reloads": None,
        }
        if add.handed is not None:
            changes["handed"] = add.handed.model_copy(update={"of": named(add.handed.of)})
        return AddStep(add=add.model_copy(update=changes))
    if isinstance(step, FailLoadStep):
        moved = step.fail_load.model_copy(update={"req": named(step.fail_load.req)})
        return FailLoadStep.model_validate({"fail-load": moved})
    if isinstance(step, ControlStep):
        return ControlStep(control=step.control.model_copy(update={"of": named(step.control.of)}))
    if isinstance(step, RunStep):
        ends = {"until": step.run.until, "loaded": step.run.loaded}
        found = {field: named(req) for field, req in ends.items() if req}
        return RunStep(run=step.run.model_copy(update=found))
    if step.mentions():  # its argument is the name
        return type(step).model_validate({step.op: named(step.arg)})
    return step


def one_by_one(steps: list[Step]) -> list[Step]:
    """Return the steps with every `add` of many requests replaced by as many `add`s of one."""
    plain: list[Step] = []
    for step in steps:
        if isinstance(step, AddStep) and isinstance(step.add, AddMany):
            plain.extend(AddStep(add=add) for add in step.adds())
        else:
            plain.append(step)
    return plain
