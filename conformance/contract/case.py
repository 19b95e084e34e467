# SPDX-License-Identifier: Apache-2.0
"""Cases: small workloads that provoke one situation, as read from spec/cases/<area>/<id>.yaml.

A case only drives the engine; the contract is judged by the requirements on its trace. `steps` and
expectations are closed sets: each is a map with one key. Their models are in
kvconform.contract.steps and kvconform.contract.expectations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from kvconform.contract.expectations import Expectation
from kvconform.contract.expression import Expression, compile_capability
from kvconform.contract.requirement import (
    CapabilityExpr,
    Id,
    Model,
    Relation,
    Requirement,
    Version,
    in_force,
)
from kvconform.contract.situation import policies, situations
from kvconform.contract.steps import (
    ONE_BYTE,
    UNREPEATABLE,
    Add,
    CacheDType,
    DType,
    Layout,
    Otherwise,
    SamePrompt,
    Step,
    changes_settings,
    one_by_one,
    restarts_process,
)
from kvconform.errors import WrongPart, did_you_mean

Device = Literal["cpu", "cuda", "emulated"]
"""Where a KV cache is."""
Slow = Literal["compute", "transfers"]
"""Streams of a device that can be slow."""
SLOW: tuple[Slow, ...] = ("compute", "transfers")

GroupKind = Literal["full", "broad", "sliding", "wide", "local", "private", "latent", "state"]
LARGE: frozenset[GroupKind] = frozenset({"broad", "wide"})
"""Kinds of groups with twice the tokens per block."""
EVEN: frozenset[GroupKind] = frozenset({"full", "sliding", "local"})
"""Kinds of groups that engine reference has in models with several."""
Engine = Literal["reference", "vllm", "live"]
Scheduling = Literal["sync", "async"]
Runner = Literal["v1", "v2"]
Role = Literal["kv_both", "kv_producer", "kv_consumer"]
LOADERS = frozenset({"winner", "fetcher", "failer"})
"""Siblings that load KV."""
Sibling = Literal["self", "idle", "winner", "holder", "fetcher", "failer", "greeter"]
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]


class EngineOf(Model):
    """One of several engines: its role, and what it has otherwise than `config`."""

    role: Role
    block_size: PositiveInt | None = None
    num_blocks: Annotated[int, Field(ge=2)] | None = None
    tensor_parallel: Literal[1, 2] | None = Field(
        default=None, description="ranks that the heads are split over"
    )
    dtype: DType | None = Field(default=None, description="of the model, and so of its KV")
    cache_dtype: CacheDType | None = Field(
        default=None, description="of the KV cache, if it is not the model's"
    )

    @property
    def own(self) -> dict[str, Any]:
        """The fields of `config` that it has a value of its own for."""
        return self.model_dump(exclude={"role"}, exclude_none=True)


def _of_role(value: Any) -> Any:
    return {"role": value} if isinstance(value, str) else value


OneEngine = Annotated[EngineOf, BeforeValidator(_of_role, json_schema_input_type=Role | EngineOf)]


class Config(Model):
    """The engine that a case needs.

    Sizes are in tokens and blocks; `num_blocks` includes the null block 0.
    """

    block_size: PositiveInt = 4
    num_blocks: PositiveInt = 32
    used_blocks: NonNegativeInt = Field(
        default=0,
        description="blocks that were in use before, so that the next ones have higher ids",
    )
    budget: PositiveInt = Field(default=64, description="max_num_batched_tokens")
    max_seqs: PositiveInt = 8
    prefix_caching: bool = True
    kv_events: bool = Field(default=False, description="KV events are switched on")
    spec_tokens: Annotated[int, Field(ge=0)] = 0
    load_failure_policy: Literal["recompute", "fail"] = "recompute"
    role: Role = "kv_both"
    model: str = Field(
        default="kvconform/tiny-model", description="name; models of other names have other KV"
    )
    revision: str | None = Field(
        default=None, description="of the model's weights; those of other revisions have other KV"
    )
    quantization: str | None = Field(
        default=None, description="of the model's weights; those quantised otherwise have other KV"
    )
    hf_overrides: dict[str, Any] = Field(
        default={}, description="changes of the model's configuration, such as its rope_theta"
    )
    dtype: DType = Field(default="float32", description="of the model, and so of its KV")
    cache_dtype: CacheDType = Field(
        default="auto", description="of the KV cache, if it is not the model's"
    )
    max_model_len: PositiveInt = 256
    tensor_parallel: Literal[1, 2, 3, 4] = Field(
        default=1,
        description="ranks that the heads are split over (two heads); latent KV is on all of them",
    )
    pipeline_parallel: Literal[1, 2] = Field(
        default=1, description="ranks that the layers are split over"
    )
    context_parallel: Literal[1, 2, 3, 4] = Field(
        default=1,
        description="neighbouring tensor parallel ranks that a block's tokens are split over",
    )
    context_interleave: PositiveInt = Field(
        default=1,
        description="tokens in a row that one of these ranks holds (cp_kv_cache_interleave_size)",
    )
    long_prefill_threshold: Annotated[int, Field(ge=0)] = Field(
        default=0, description="long_prefill_token_threshold, 0 = off"
    )
    engines: dict[Name, OneEngine] = Field(
        default={},
        description="several engines in one run, the first of which is driven first: name ->"
        " kv_role, or a map of the role and what the engine has otherwise",
    )
    groups: list[GroupKind] = Field(
        default=[],
        description="KV cache groups of one layer each; a single one has all layers",
    )
    layers: list[NonNegativeInt] = Field(
        default=[],
        description="numbers of the layers that have KV, if the model has others, which have none",
    )
    drafter: bool = Field(
        default=False,
        description="the last layer is the drafter's (MTP), whose number is num_hidden_layers",
    )
    narrow_layer: Literal["first", "last"] | None = Field(
        default=None,
        description="this layer has half of the heads, in one group with the others",
    )
    window: Annotated[int, Field(ge=2)] = Field(
        default=8, description="tokens in a sliding window, or in a chunk of local attention"
    )
    stats: bool = Field(default=False, description="the engine keeps statistics (log_stats)")
    kernel_block_size: PositiveInt | None = Field(
        default=None,
        description="tokens per block of the KV tensors, if the attention needs smaller blocks",
    )
    graphs: bool = Field(
        default=False,
        description="steps of one token per request replay a graph, which calls no layer hooks,"
        " unless the connector's class requires piecewise graphs",
    )
    prefix_match_unit: PositiveInt | None = Field(
        default=None,
        description="tokens per block hash, if smaller than a block: a prefix-cache hit may end"
        " inside a block",
    )
    retention_interval: NonNegativeInt | None = Field(
        default=0,
        description="tokens between the states and windows that the prefix cache keeps; 0: those at"
        " the end of a prompt and of what prompts share, null: all",
    )
    pooling: bool = Field(
        default=False,
        description="a pooling model: requests have no sampling parameters, and end with one vector"
        " for their prompt; `max_tokens` means nothing",
    )
    layout: Layout | None = Field(
        default=None,
        description="the only order of a KV tensor's axes that the attention supports",
    )
    multi: list[Sibling] = Field(
        default=[],
        description="run inside of MultiConnector with these children; `self` is the connector",
    )

    @property
    def weights(self) -> tuple[Any, ...]:
        """What tells the model apart from others whose prompts have the same tokens.

        So does the format of a cache of bytes: the tensors of all such formats are alike.
        """
        fp8 = self.cache_dtype if self.cache_dtype in ONE_BYTE else None
        return self.model, self.revision, self.quantization, self.hf_overrides, fp8

    @property
    def ranks(self) -> int:
        """The number of worker halves."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def layer_numbers(self) -> list[int]:
        """The numbers of the layers with KV: one per group, or two by default and the drafter's."""
        several = len(self.groups) > 1
        return self.layers or list(range(len(self.groups) if several else 2 + self.drafter))

    @property
    def hidden_layers(self) -> int:
        """The model's num_hidden_layers, which a drafter's layer does not count in."""
        return self.layer_numbers[-1] + (not self.drafter)

    @property
    def roles(self) -> dict[str, Role]:
        """The roles of several engines, by their names."""
        return {name: each.role for name, each in self.engines.items()}

    @property
    def own(self) -> dict[str, dict[str, Any]]:
        """The fields in which engines differ from `config`, by the names of those that do."""
        found = {
            name: {key: value for key, value in each.own.items() if value != getattr(self, key)}
            for name, each in self.engines.items()
        }
        return {name: own for name, own in found.items() if own}

    @property
    def unlike(self) -> dict[str, dict[str, Any]]:
        """The same, but for the number of blocks, with which KV stays alike."""
        found = {
            name: {key: value for key, value in own.items() if key != "num_blocks"}
            for name, own in self.own.items()
        }
        return {name: own for name, own in found.items() if own}

    @property
    def suffix(self) -> str:
        """Suffix that makes the engine ids of one run distinct."""
        return ""


class EngineConfig(Config):
    """Configuration of one of several engines of a run, whose id ends with its name."""

    name: str

    @property
    def suffix(self) -> str:
        """Ending of the engine id."""
        return f"-{self.name}"


OPTIONS: dict[str, str] = {
    "num_blocks": "num_gpu_blocks_override",
    "budget": "max_num_batched_tokens",
    "max_seqs": "max_num_seqs",
    "prefix_caching": "enable_prefix_caching",
    "kv_events": "kv_events_config",
    "spec_tokens": "speculative_config",
    "load_failure_policy": "kv_transfer_config",
    "role": "kv_transfer_config",
    "model": "model",
    "revision": "revision",
    "quantization": "quantization",
    "hf_overrides": "hf_overrides",
    "dtype": "dtype",
    "cache_dtype": "kv_cache_dtype",
    "max_model_len": "max_model_len",
    "tensor_parallel": "tensor_parallel_size",
    "pipeline_parallel": "pipeline_parallel_size",
    "context_parallel": "decode_context_parallel_size",
    "context_interleave": "cp_kv_cache_interleave_size",
    "long_prefill_threshold": "long_prefill_token_threshold",
    "window": "hf_overrides",
    "prefix_match_unit": "prefix_match_unit",
    "retention_interval": "prefix_cache_retention_interval",
    "stats": "disable_log_stats",
    "pooling": "runner",
}
"""Fields of `Config` that need no situation, as vLLM has such an option: field -> EngineArgs."""


OF_GENERATION = frozenset(
    {
        "params",
        "skip_save",
        "hand_over",
        "handed",
        "drafts",
        "stop_at",
        "repeats_at",
        "structured",
        "session",
    }
)
"""Fields of `add` that a pooling model's requests cannot have: vLLM reads them from sampling."""


class Matrix(Model):
    """The axes of a case, which runs on their product.

    `depth` is the number of steps in flight with async scheduling; with sync it is always 1.
    """

    scheduling: list[Scheduling] = Field(default=["sync", "async"], min_length=1)
    runner: list[Runner] = Field(default=["v1"], min_length=1)
    depth: list[PositiveInt] = Field(default=[2], min_length=1)
    block_size: list[PositiveInt] | None = Field(
        default=None, min_length=1, description="default: config.block_size"
    )
    slow: list[Slow] = Field(
        default=list(SLOW),
        min_length=1,
        description="streams that are slow, one per run; only on a device with streams",
    )


class Inspection(Model):
    """Static checks of the connector's class, of its instance, and of the installed vLLM.

    `child_registered_as`: the name in vLLM's factory of a child of MultiConnector whose statistics
    are rebuilt: the name of its class, or another one.
    """

    child_registered_as: Literal["its-class", "another-name"] = "its-class"


class Case(Model):
    """One case file."""

    id: Id
    area: str
    text: str = Field(min_length=1)
    rules: list[Annotated[str, Field(pattern=r"^R\d{3}$")]] = []
    bugs: list[Annotated[str, Field(pattern=r"^B\d{3}$")]] = []
    since: Version | None = Field(
        default=None, description="first vLLM version whose engine can reach the situation"
    )
    config: Config = Config()
    matrix: Matrix = Matrix()
    engines: list[Engine] = Field(default=["reference", "vllm"], min_length=1)
    policies: list[str] = []
    inspect: Inspection | None = None
    needs: CapabilityExpr = "core"
    relations: list[Relation] = ["no-connector"]
    steps: list[Step] = Field(min_length=1)
    expect: list[Expectation] = []
    provokes: list[Expectation] = []

    @field_validator("steps")
    @classmethod
    def _steps_go_together(cls, steps: list[Step], info: ValidationInfo) -> list[Step]:
        """Check the steps as they were written; return them with one request per `add`."""
        added: set[str] = set()
        config, matrix = info.data.get("config"), info.data.get("matrix")
        on = next(iter(config.engines), None) if config is not None else None
        for index, step in enumerate(steps):
            unknown = step.mentions() - added
            if unknown:
                raise WrongPart(
                    f"`{step.op}` names request {sorted(unknown)[0]!r}, which no earlier step adds",
                    (index,),
                )
            for add in step.adds():
                if add.req in added:
                    raise WrongPart(
                        f"adds request {add.req!r} again; use another name with the same `id`",
                        (index,),
                    )
                added.add(add.req)
            if config is not None and matrix is not None:
                problem = _unfit(step, config, matrix, on)
                if problem:
                    raise WrongPart(problem, (index,))
                on = step.arg if step.op == "on" else on
                if isinstance(step.arg, Otherwise):
                    config = _with(config, step.arg)
                    matrix = Matrix() if step.arg.block_size else matrix
            if step.op == "soak":
                earlier = {each.op for each in steps[:index]}
                if not added or (bad := sorted(earlier & set(UNREPEATABLE))):
                    what = f"`{bad[0]}`" if added else "no request"
                    raise WrongPart(f"`soak` repeats the steps before it, with {what}", (index,))
        return one_by_one(steps)

    @field_validator("policies")
    @classmethod
    def _policies_exist(cls, names: list[str]) -> list[str]:
        for index, name in enumerate(names):
            if name not in policies():
                close = did_you_mean(name, policies())
                raise WrongPart(f"there is no policy {name!r}{close}", (index,))
        return names

    @model_validator(mode="after")
    def _requests_exist(self) -> Case:
        added = {step.arg.req for step in self.steps if step.op == "add"}
        for field in ("expect", "provokes"):
            for index, expectation in enumerate(getattr(self, field)):
                unknown = expectation.mentions() - added
                if unknown:
                    name = sorted(unknown)[0]
                    raise WrongPart(
                        f"{expectation.what} names request {name!r}, which no step adds",
                        (field, index),
                    )
        return self

    @model_validator(mode="after")
    def _nothing_handed_over_is_reset(self) -> Case:
        if _hands_over(self) and _resets_common_store(self):
            raise ValueError(
                "`reset` of the connector is not possible with `handed`: "
                "what a hand-over owes after a reset is not defined"
            )
        return self

    @model_validator(mode="after")
    def _pooling_fits(self) -> Case:
        if self.config.pooling and (self.config.engines or self.config.spec_tokens):
            raise ValueError("config: pooling needs one engine, and no spec_tokens")
        return self

    @model_validator(mode="after")
    def _ranks_fit(self) -> Case:
        config = self.config
        latent = config.groups == ["latent"]
        degrees = self.context_degrees
        if max(degrees) > 1 and (
            not latent
            or any(each.tensor_parallel % each.context_parallel for each, _ in self.configurations)
        ):
            raise ValueError(
                "config: context_parallel needs groups [latent], and must divide tensor_parallel"
            )
        if any(
            size % (each.context_parallel * each.context_interleave)
            for each, sizes in self.configurations
            for size in sizes
        ):
            raise ValueError(
                "config: context_parallel times context_interleave must divide the block size"
            )
        for step in self.steps:
            if step.op == "fail-load" and (step.arg.rank or 0) >= config.ranks:
                raise ValueError(f"fail-load: there is no rank {step.arg.rank}")
        if config.tensor_parallel > 2 and not latent:
            raise ValueError("config: more than two tensor parallel ranks need groups [latent]")
        for each, _ in self.configurations:
            if each.pipeline_parallel > 1 and len(config.groups) > 1:
                raise ValueError("config: pipeline_parallel needs a model of one group")
            if each.ranks > 1 and not LARGE.isdisjoint(config.groups):
                raise ValueError("config: a group with half of the heads needs one rank")
        return self

    @model_validator(mode="after")
    def _layers_fit(self) -> Case:
        config = self.config
        if config.narrow_layer and (
            config.groups
            or config.layout
            or config.kernel_block_size
            or any(each.ranks > 1 for each, _ in self.configurations)
        ):
            raise ValueError(
                "config: narrow_layer needs one rank, one group, vLLM's layout and whole blocks"
            )
        numbers = config.layer_numbers
        if numbers != sorted(set(numbers)) or len(numbers) < max(2, len(config.groups)):
            raise ValueError("config: layers are at least two numbers that rise")
        if len(config.groups) > 1 and len(numbers) != len(config.groups):
            raise ValueError(
                "config: layers and groups must be as many, if there are several groups"
            )
        if self.stages > 1 and self.engines != ["vllm"]:
            raise ValueError("pipeline_parallel: engines must be [vllm]")
        # vLLM gives the first of two stages one layer more if they cannot have as many.
        split = config.hidden_layers - config.hidden_layers // 2
        if self.stages > 1 and not numbers[0] < split <= numbers[-1]:
            raise ValueError("config: layers: each pipeline stage needs one with KV")
        own = [name for each in config.own.values() for name in each]
        plain = config.dtype == "float32" and config.cache_dtype == "auto"
        plain = plain and not {"dtype", "cache_dtype"} & {*own}
        if "state" in config.groups and not plain:
            raise ValueError("config: dtype and cache_dtype need groups without states")
        if "state" in config.groups and not config.prefix_caching:
            raise ValueError("config: groups with states need prefix_caching")
        if "tensor_parallel" in own and (config.groups or config.context_parallel > 1):
            raise ValueError("config: engines: tensor_parallel needs a model without groups")
        if config.drafter and self.stages > 1:
            raise ValueError("config: drafter needs one pipeline stage")
        if config.drafter and (not config.spec_tokens or self.engines != ["vllm"]):
            raise ValueError("config: drafter needs spec_tokens, and engines must be [vllm]")
        if config.drafter and config.groups and config.groups[-1] in ("state", "private"):
            raise ValueError("config: the last group is the drafter's, which is attention")
        return self

    @model_validator(mode="after")
    def _one_process_more(self) -> Case:
        if sum(restarts_process(step) for step in self.steps) > 1:
            raise ValueError(
                "restart: at most one restart of a case is in another process"
                " (`engine` and `another-engine` are not)"
            )
        return self

    @model_validator(mode="after")
    def _kernel_blocks(self) -> Case:
        for config, sizes in self.configurations:
            size = config.kernel_block_size
            if size is None:
                continue
            if len(config.groups) > 1 or config.layout not in (None, "LBHNC", "LBNHC"):
                raise ValueError(
                    "config: kernel_block_size needs one group, and layout LBHNC or LBNHC, if any"
                )
            if any(each % (size * config.context_parallel) for each in sizes):
                raise ValueError(
                    "config: kernel_block_size must divide the blocks of a rank's memory"
                )
        return self

    @model_validator(mode="after")
    def _hash_blocks(self) -> Case:
        unit = self.config.prefix_match_unit
        if unit is None:
            return self
        every = [size for _, sizes in self.configurations for size in sizes]
        if len(self.config.groups) < 2 or any(each % unit for each in every):
            raise ValueError(
                "config: prefix_match_unit needs several groups, and must divide the block size"
            )
        if self.engines != ["vllm"]:
            raise ValueError("config: prefix_match_unit: engines must be [vllm]")
        return self

    @model_validator(mode="after")
    def _local_chunks(self) -> Case:
        config = self.config
        every = [size for _, sizes in self.configurations for size in sizes]
        if "local" in config.groups and (
            LARGE & {*config.groups}
            or config.drafter
            or any(config.window % each for each in every)
        ):
            raise ValueError(
                "config: a local group needs blocks of one size, a window of whole blocks,"
                " and no drafter"
            )
        return self

    @model_validator(mode="after")
    def _several_engines(self) -> Case:
        names = self.config.engines
        ids = [add.arg.id or add.arg.req for add in self.steps if add.op == "add"]
        if names and len(set(ids)) < len(ids):
            raise ValueError("with several engines every request needs an id of its own")
        groups = self.config.groups
        if len(groups) > 1 and (groups[0] not in {"full", *LARGE} or "latent" in groups):
            raise ValueError(
                "config: with several groups the first must be full, broad or wide, and none may be"
                " latent"
            )
        others = sorted(set(groups) - EVEN)
        if len(groups) > 1 and others and self.engines != ["vllm"]:
            raise ValueError(f"config: groups: {others[0]}: engines must be [vllm]")
        if len(groups) > 1 and not LOADERS.isdisjoint(self.config.multi):
            raise ValueError("config: multi: winner, fetcher and failer know one group only")
        if len(groups) == 1 and groups[0] not in ("full", "latent", "sliding"):
            raise ValueError("config: a single group must be full, latent or sliding")
        adds = [add for step in self.steps for add in step.adds()]
        if any(add.structured for add in adds) and self.engines != ["vllm"]:
            raise ValueError("structured output: only engine vllm has it")
        if any(add.repeats_at is not None for add in adds) and self.engines != ["vllm"]:
            raise ValueError("repeats_at: only engine vllm detects repetitions")
        sessions = any(add.session for add in adds)
        if sessions and "state" in groups and self.config.spec_tokens:
            raise ValueError("sessions: with drafts, vLLM loses the states that they go on from")
        if self.matrix.block_size and any(each.block_size for each in names.values()):
            raise ValueError(
                "matrix: block_size is that of all engines; none may have a block_size of its own"
            )
        if len(names) == 1 or (self.config.multi and "self" not in self.config.multi):
            raise ValueError(
                "config: engines are none or several; multi has `self` among its children"
            )
        return self

    @property
    def changes(self) -> list[Otherwise]:
        """What restarts change of the configuration, one after the other."""
        return [step.arg for step in self.steps if isinstance(step.arg, Otherwise)]

    @property
    def changes_settings(self) -> bool:
        """Whether the connector has other options after a restart."""
        return any(map(changes_settings, self.steps))

    @property
    def configurations(self) -> list[tuple[Config, list[int]]]:
        """The configurations of all engines, also after restarts, each with its block sizes."""
        found = [(self.config, self.matrix.block_size or [self.config.block_size])]
        for each in self.changes:
            config, sizes = found[-1]
            found.append((_with(config, each), [each.block_size] if each.block_size else sizes))
        config, sizes = found[0]
        for own in self.config.own.values():
            size = [own["block_size"]] if "block_size" in own else sizes
            found.append((config.model_copy(update=own), size))
        return found

    @property
    def stages(self) -> int:
        """The most pipeline stages that an engine of the case has."""
        return max(config.pipeline_parallel for config, _ in self.configurations)

    @property
    def late_workers(self) -> bool:
        """Whether the workers execute a step only when the engine awaits its output."""
        return "late-workers" in self.policies

    @property
    def late_threads(self) -> bool:
        """Whether the connector's threads get time only now and then, on a CPU."""
        return "late-threads" in self.policies

    @property
    def context_degrees(self) -> list[int]:
        """The degrees of context parallelism of the engines, one after the other."""
        return [config.context_parallel for config, _ in self.configurations]

    @cached_property
    def needs_expr(self) -> Expression:
        """The condition over `cap`: the declared `needs`, and what steps and config imply."""
        implied = sorted({need for step in self.steps if (need := step.needs)})
        if len(self.config.groups) > 1:
            implied.append("hma")
        if self.config.multi:
            implied.append("!composite")
        if "greeter" in self.config.multi:
            # MultiConnector hands peers the greeter's handshake metadata, not the connector's
            implied.append("!transfer")
        if any(step.op == "fail-load" for step in self.steps) and not self.config.engines:
            implied.append("store or synthesises_kv")  # else there is no load to fail
        if max(self.context_degrees) > 1:
            implied.append("context_parallel")
        if self.stages > 1:
            implied.append("pipeline_parallel")
        # Every connector has role kv_both over a store; those that hand over may not.
        over_store = set() if _hands_over(self) else {"kv_both"}
        roles = sorted(set(self.config.roles.values()) - over_store)
        implied += [f"'{role}' in cap.roles" for role in roles]
        needs = [] if self.needs == "core" and implied else [self.needs]
        return compile_capability([*needs, *implied])

    @property
    def situations(self) -> list[str]:
        """The situations (spec/situations.yaml) that policies, configuration and steps make."""
        changed = (name for name in type(self.config).model_fields if self._configures(name))
        known = situations()
        found = [
            *self.policies,
            *(name for name, has in PROPERTIES.items() if has(self)),
            *(name for name in changed if name in known and known[name].of == "config"),
            *(step.op for step in self.steps if step.op in known),
        ]
        return list(dict.fromkeys(found))

    def _configures(self, field: str) -> bool:
        """Return whether a field of the configuration has another value than its default."""
        default = type(self.config).model_fields[field].default
        return bool(getattr(self.config, field) != default)

    @property
    def added(self) -> list[Add]:
        """The requests, in the order in which they are added."""
        return [step.arg for step in self.steps if step.op == "add"]

    @cached_property
    def beyond(self) -> tuple[str, ...]:
        """The situations of the case that the contract allows and vLLM does not bring about."""
        return tuple(name for name in self.situations if not situations()[name].vllm)

    def is_about(self, req: Requirement) -> bool:
        """Return whether the case shares a rule or a bug with the requirement."""
        return bool({*self.rules, *self.bugs} & {*req.rules, *req.bugs})

    def in_force(self, vllm: str) -> bool:
        """Return whether the case is run with this vLLM version."""
        return in_force(self.since, None, vllm)

    def unmet(self, caps: dict[str, Any]) -> str | None:
        """Return the condition that these capabilities do not meet; None if the case suits them."""
        return None if self.needs_expr.bind(caps)({}) else self.needs_expr.source

    def variants(
        self,
        engines: Sequence[str] | None = None,
        schedulings: Sequence[str] | None = None,
        slow: Sequence[str] | None = None,
    ) -> list[Variant]:
        """Return the runs of this case on the given engines and schedulings, in a fixed order.

        None stands for every engine or scheduling that the case names. On a device with streams,
        `slow` are the streams to slow down, one per run, out of those that the case names. None: a
        device without streams.
        """
        return list(self._variants(engines, schedulings, slow))

    def _variants(
        self,
        engines: Sequence[str] | None,
        schedulings: Sequence[str] | None,
        slow: Sequence[str] | None,
    ) -> Iterator[Variant]:
        sizes = self.matrix.block_size or [self.config.block_size]
        streams: list[Slow | None] = [None]
        if slow is not None:
            streams = [each for each in self.matrix.slow if each in slow]
        for engine in self.engines:
            for scheduling in self.matrix.scheduling:
                if (engines is not None and engine not in engines) or (
                    schedulings is not None and scheduling not in schedulings
                ):
                    continue
                for runner in self.matrix.runner:
                    for depth in self.matrix.depth if scheduling == "async" else [1]:
                        for size in sizes:
                            for which in streams:
                                yield Variant(self, engine, scheduling, runner, depth, size, which)


def _reuses_id(case: Case) -> bool:
    return max(Counter(add.id or add.req for add in case.added).values(), default=0) > 1


def _shares_params(case: Case) -> bool:
    others = (add for add in case.added if not isinstance(add.prompt, SamePrompt))
    asked = [add.params for add in others if add.hand_over and add.params]
    return any(asked.count(params) > 1 for params in asked)


def _replays_params(case: Case) -> bool:
    handed = Counter(add.handed.of for add in case.added if add.handed and not add.handed.alter)
    return max(handed.values(), default=0) > 1


def _hands_over(case: Case) -> bool:
    return any(add.handed is not None for add in case.added)


def _resets_common_store(case: Case) -> bool:
    return bool(case.config.engines) and any(
        step.op == "reset" and step.arg.connector for step in case.steps
    )


def _resets_before_work(case: Case) -> bool:
    # A producer's blocks are not kept for the steps in flight: it is told that the reset worked.
    roles = {*case.config.roles.values()} or {case.config.role}
    return case.late_workers and roles != {"kv_producer"} and _resets_in_flight(case.steps)


def _resets_in_flight(steps: Sequence[Step]) -> bool:
    """Return whether the connector is reset while steps may be in flight, or in a soak."""
    flying = False
    for step in steps:
        if step.op == "run":
            flying = {step.arg.until, step.arg.loaded, step.arg.max} != {None}
        elif step.op in ("step", "schedule", "idle"):
            flying = True
        elif step.op == "reset" and step.arg.connector and flying:
            return True
    ops = [step.op for step in steps]
    return "soak" in ops and "reset" in ops[: ops.index("soak")]


def _stands_still(case: Case) -> bool:
    """Return whether time passes on one engine while another one may load."""
    loading = False
    for step in case.steps:
        if step.op == "add" and step.arg.handed is not None:
            loading = True
        elif step.op == "run":
            loading = False
        elif step.op == "idle" and step.arg.seconds and loading:
            return True
    return False


def _alters_params(case: Case, *, to_nothing: bool) -> bool:
    values = [
        value for add in case.added if add.handed is not None for value in add.handed.alter.values()
    ]
    return any((value is None) == to_nothing for value in values)


PROPERTIES: dict[str, Callable[[Case], bool]] = {
    "reused-id": _reuses_id,
    "private-group": lambda case: "private" in case.config.groups,
    "shared-params": _shares_params,
    "stands-still": _stands_still,
    "longer-offer": lambda case: any(add.hand_over and add.max_tokens > 1 for add in case.added),
    "replayed-params": _replays_params,
    "unknown-peer": lambda case: _alters_params(case, to_nothing=False),
    "incomplete-params": lambda case: _alters_params(case, to_nothing=True),
    "common-reset": _resets_common_store,
    "reset-before-work": _resets_before_work,
    "other-model": lambda case: any(
        each.model or each.revision or each.quantization or each.hf_overrides
        for each in case.changes
    ),
    "other-format": lambda case: any(
        each.dtype
        or each.cache_dtype
        or each.tensor_parallel
        or each.pipeline_parallel
        or each.layout
        or each.block_size
        or each.kernel_block_size
        for each in case.changes
    ),
    "unlike-peers": lambda case: bool(case.config.unlike) and _hands_over(case),
    "unlike-sharers": lambda case: bool(case.config.unlike) and not _hands_over(case),
    "shutdown-again": lambda case: any(
        step.op == "shutdown" and step.arg.again for step in case.steps
    ),
}
"""Situations that are neither a policy, a step nor a field: whether a case has them."""


def _with(config: Config, change: Otherwise) -> Config:
    """Return the configuration of an engine that a restart has changed."""
    return config.model_copy(update=change.model_dump(exclude_none=True))


def _unfit(step: Step, config: Config, matrix: Matrix, on: str | None) -> str | None:
    """Return why the engine of `config`, of several the one named `on`, cannot do this step."""
    names = config.engines
    if step.op == "on" and step.arg not in names:
        return f"`on` names engine {step.arg!r}; config.engines has {', '.join(names) or 'none'}"
    if names and step.op in ("restart", "shutdown", "damage"):
        return (
            f"`{step.op}` is not possible with several engines: it would affect their common store"
        )
    for add in step.adds():
        if not names and add.handed is not None:
            return "`handed` needs several engines (config.engines)"
        if config.pooling and (given := sorted(add.model_fields_set & OF_GENERATION)):
            return f"`{given[0]}` needs a model that generates; config.pooling says otherwise"
        if not isinstance(add.prompt, int):
            continue
        adds = f"adds a prompt of {add.prompt} tokens"
        if add.prompt >= config.max_model_len:
            return f"{adds}; config.max_model_len is {config.max_model_len}"
        own = config.own.get(on or "", {})
        blocks = own.get("num_blocks", config.num_blocks)
        size = own.get("block_size")
        sizes = [size] if size else matrix.block_size or [config.block_size]
        room = (blocks - 1) * max(sizes)  # block 0 is the null block
        if add.prompt > room and not config.groups:
            too_many = f"too many for num_blocks {blocks}"
            return f"{adds}, {too_many}: there is room for {room}"
    return None


def variant_id(
    case: str,
    engine: str,
    scheduling: str,
    runner: str,
    depth: int,
    block_size: int,
    slow: str | None = None,
) -> str:
    """Return the name of a run: its case and its axes."""
    suffix = f"-slow-{slow}" if slow else ""
    return f"{case}[{engine}-{scheduling}-{runner}-d{depth}-b{block_size}{suffix}]"


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """One run to do: a case at one point of its axes. Variants are equal if their ids are."""

    case: Case
    engine: str
    scheduling: str
    runner: str
    depth: int
    block_size: int
    slow: Slow | None = None

    @property
    def id(self) -> str:
        """The name of the run: its case and its axes."""
        return variant_id(self.case.id, **self.axes)

    def of_engine(self, name: str | None) -> Variant:
        """Return the run as the engine `name` of several has it. None: the run itself."""
        if name is None or name not in self.case.config.engines:
            return self
        own = self.case.config.own.get(name, {})
        found = self.named(name, role=self.case.config.roles[name], **own)
        return replace(found, block_size=own.get("block_size", self.block_size))

    def named(self, name: str, **changed: Any) -> Variant:
        """Return the run with an engine whose id ends with `name`, and some other fields."""
        config = EngineConfig(**{**dict(self.case.config), **changed, "name": name})
        return replace(self, case=self.case.model_copy(update={"config": config}))

    def are_alike(self, one: str | None, other: str | None) -> bool:
        """Return whether two engines of the run have the same sizes of blocks and data types."""
        unlike = self.case.config.unlike
        return unlike.get(one or "") == unlike.get(other or "")

    @property
    def hash_size(self) -> int:
        """Tokens per block hash."""
        return self.case.config.prefix_match_unit or self.block_size

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes among the constants of the run, which a restart or an engine may change.

        `block_size` is that of the first group; `ranks` is the number of worker halves.
        """
        large = not LARGE.isdisjoint(self.case.config.groups[:1])
        return {
            "block_size": self.block_size * (2 if large else 1),
            "hash_size": self.hash_size,
            "num_blocks": self.case.config.num_blocks,
            "ranks": self.case.config.ranks,
        }

    @property
    def axes(self) -> dict[str, Any]:
        """Engine, scheduling, runner, depth, block_size; on a device with streams also `slow`."""
        found: dict[str, Any] = {
            "engine": self.engine,
            "scheduling": self.scheduling,
            "runner": self.runner,
            "depth": self.depth,
            "block_size": self.block_size,
        }
        if self.slow:
            found["slow"] = self.slow
        return found

    @property
    def words(self) -> str:
        """The axes, as a reader says them: what the brackets of the id abbreviate."""
        flight = "1 step" if self.depth == 1 else f"{self.depth} steps"
        parts = [
            f"engine {self.engine}",
            f"scheduling {self.scheduling}",
            f"model runner {self.runner.upper()}",
            f"{flight} in flight",
            f"block size {self.block_size}",
        ]
        return ", ".join(parts + ([f"slow {self.slow}"] if self.slow else []))

    @property
    def beyond(self) -> tuple[str, ...]:
        """The situations of the run that the contract allows and vLLM does not bring about."""
        return self.case.beyond

    @property
    def late(self) -> bool:
        """Whether the workers execute a step late. See Case.late_workers."""
        return isinstance(self.case, Case) and self.case.late_workers

    @property
    def inspects(self) -> bool:
        """Whether the run makes the static checks of the connector."""
        return isinstance(self.case, Case) and self.case.inspect is not None

    def restarted(self, change: Otherwise) -> Variant:
        """Return the run with the configuration that a restart has changed."""
        case = self.case.model_copy(update={"config": _with(self.case.config, change)})
        return replace(self, case=case, block_size=change.block_size or self.block_size)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Variant) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)
