# SPDX-License-Identifier: Apache-2.0
"""Settings of a run: from the command line, else from the connector's repository, else defaults.

The repository has them in `kvconform.toml`, or in `[tool.kvconform]` of pyproject.toml. Unknown
keys and wrong values are UsageErrors that name the place.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeInt,
    ValidationError,
    field_validator,
)

from kvconform.adapters import registry as adapters
from kvconform.config import catalogue as named
from kvconform.contract.capabilities import complete
from kvconform.contract.case import SLOW, Device
from kvconform.contract.loader import in_words
from kvconform.contract.profile import Expected
from kvconform.errors import UsageError, did_you_mean
from kvconform.files import broken_toml
from kvconform.process.server import ServerSpec
from kvconform.process.watchdog import DEFAULT_LIMIT


@dataclass(frozen=True, order=True)
class Shard:
    """Part `number` (from 1) of `count`."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def parse(text: str) -> Shard:
    """Parse a shard such as `2/4`. ValueError in one sentence for anything else."""
    found = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", text)
    shard = Shard(int(found[1]), int(found[2])) if found else Shard(0, 0)
    if not 1 <= shard.number <= shard.count:
        raise ValueError("a shard is i/n with 1 <= i <= n, such as 2/4")
    return shard


REFERENCE = "kvconform.refimpl.connector:ReferenceConnector"
ENGINES = ("reference", "vllm")
SCHEDULINGS = ("sync", "async")
PLACEHOLDERS = ("tmp", "block_size")
"""What a run replaces in the strings of the connector's options, in braces (Target.options)."""
COMMAND_LINE = "the command line"
_REPEATED = {"adapters": "adapter", "cases": "case"}
"""Settings with several values whose option, which is given once for each, is named by one."""
HASH_SEED = "PYTHONHASHSEED"
"""Variable of `env` that every interpreter must have from its start."""


class Settings(BaseModel):
    """All settings of one run. Paths are absolute once `load` is done."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_default=False)

    connector: str = Field(default=REFERENCE, min_length=1)
    catalogue: str | None = Field(
        default=None, description="the connector's name in the catalogue, if given by that name"
    )
    extra_config: dict[str, JsonValue] = {}
    extra_config_after_restart: dict[str, JsonValue] = Field(
        default={},
        description="options over these with which the connector comes back over the same store"
        " (`restart: settings`)",
    )
    adapters: list[str] = Field(
        default=[], description="stand-ins for what the connector lacks here (docs/adapters.md)"
    )
    role: Literal["kv_both", "kv_producer", "kv_consumer"] | None = None
    capabilities: dict[str, Any] = Field(
        default={}, description="declared capabilities, over those that the class declares"
    )
    router: str | None = Field(
        default=None,
        description="package.module:Class that makes the kv_transfer_params of a producer's and a "
        "consumer's requests, in place of vLLM's example proxies (docs/guide-connector-authors.md)",
    )
    request_params: dict[str, JsonValue] = Field(
        default={},
        description="kv_transfer_params of each request, unless its case sends others or hands it "
        "over (engines reference and vllm)",
    )
    half: Literal["both", "scheduler"] = Field(
        default="both", description="scheduler: judge the scheduler half alone"
    )
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="where the KV cache is")
    emulate_cuda: bool = Field(
        default=False,
        description="with device cpu: the connector sees an emulated CUDA device",
    )
    slow: Literal["compute", "transfers", "all"] = Field(
        default="all", description="streams that are slow, on a device that has streams"
    )
    engine: Literal["reference", "vllm", "live", "all"] = Field(
        default="all", description="all: reference and vllm"
    )
    seeds: int = Field(
        default=0,
        ge=0,
        description="engine live: number of additional random workloads, with seeds from `seed` on",
    )
    shrink: bool = Field(
        default=True, description="engine live: make each random workload that fails small"
    )
    scheduling: Literal["sync", "async", "all"] = "all"
    select: list[str] = Field(
        default=[], description="ids, areas or globs of cases and requirements; ids of runs"
    )
    cases: list[str] = Field(
        default=[],
        description="files of cases that are not part of the suite; "
        "without `select`, only these are run",
    )
    shard: str | None = Field(
        default=None, description="i/n: only the i-th of n parts of the selected runs"
    )
    profile: str = "core"
    seed: NonNegativeInt = 0
    strict: bool = False
    workers: int = Field(default=min(2, os.cpu_count() or 1), ge=1, le=256)
    hook_timeout: float = Field(default=DEFAULT_LIMIT, gt=0, allow_inf_nan=False)
    stall_seconds: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    report_dir: str = "kvconform-report"
    trace: str | None = None
    debug: bool = False
    verbose: bool = Field(
        default=False, description="print tables of all verdicts, and every failure at length"
    )
    full: bool = Field(
        default=False,
        description="a line per requirement and run in report.jsonl, also without findings",
    )
    disable: list[str] = Field(
        default=[], description="globs over ids of requirements and cases to switch off"
    )
    expected_failures: list[Expected] = []
    setup: list[str] = Field(default=[], description="shell commands before the first case")
    teardown: list[str] = Field(
        default=[], description="shell commands at the end, even after a failure"
    )
    servers: list[ServerSpec] = Field(
        default=[],
        description="servers that the connector needs, started once per process with a connector",
    )
    setup_timeout: float = Field(default=120.0, gt=0, allow_inf_nan=False)
    env: dict[str, str] = Field(
        default={}, description="environment of the workers and of the commands"
    )
    pythonpath: list[str] = Field(
        default=[], description="directories in which workers look for the connector's package"
    )
    snapshot_rules: list[dict[str, Any]] = Field(
        default=[], description="values that differ from run to run, as in spec/normalise.yaml"
    )
    file: str | None = Field(default=None, description="the file that settings were read from")
    arguments: list[str] = Field(
        default=[], description="options of the command line that a reproduction needs too"
    )

    @field_validator("hook_timeout", "stall_seconds", "setup_timeout", mode="before")
    @classmethod
    def _whole_seconds(cls, value: Any) -> Any:
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("engine", "scheduling", mode="before")
    @classmethod
    def _all_of_them(cls, value: Any) -> Any:
        """Take a list of all engines or schedulings for `all`."""
        names = sorted(each.strip() for each in value.split(",")) if isinstance(value, str) else []
        if names in (sorted(ENGINES), sorted(SCHEDULINGS)):
            return "all"
        if len(names) > 1:
            raise ValueError(f"{value!r} is no engine or scheduling: name one, or all")
        return value

    @field_validator("shard")
    @classmethod
    def _is_shard(cls, value: str | None) -> str | None:
        return None if value is None else str(parse(value))

    @field_validator("router")
    @classmethod
    def _is_class(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[\w.]+:\w+", value):
            raise ValueError("name the router's class as package.module:Class")
        return value

    @field_validator("adapters")
    @classmethod
    def _exist(cls, value: list[str]) -> list[str]:
        for name in value:
            adapters.named(name)  # UsageError
        return value

    @property
    def engines(self) -> list[str]:
        """The engines to run."""
        return list(ENGINES) if self.engine == "all" else [self.engine]

    @property
    def schedulings(self) -> list[str]:
        """The schedulings to run."""
        return list(SCHEDULINGS) if self.scheduling == "all" else [self.scheduling]

    @property
    def target_device(self) -> Device:
        """The device as a target names it. UsageError for an emulation next to a real device."""
        if self.emulate_cuda and self.device == "cuda":
            raise UsageError("--emulate-cuda stands in for a GPU: it needs --device cpu")
        return "emulated" if self.emulate_cuda else self.device

    @property
    def slows(self) -> list[str] | None:
        """The streams to slow down, one per run; None on a device without streams.

        Engine live slows none. UsageError for `slow` on a device without streams.
        """
        if self.target_device == "cpu":
            if self.slow != "all":
                raise UsageError(
                    "--slow is about the streams of a device: "
                    "it needs --emulate-cuda or --device cuda"
                )
            return None
        if self.engine == "live":
            return []
        return list(SLOW) if self.slow == "all" else [self.slow]

    @property
    def all_options(self) -> dict[str, Any]:
        """The connector's options, those that it has after a restart only among them."""
        return {**self.extra_config_after_restart, **self.extra_config}

    @property
    def base(self) -> Path:
        """Base of relative paths and commands: the file's directory, else the working directory."""
        return Path(self.file).parent if self.file else Path.cwd()


def load(given: dict[str, Any], *, file: str | None = None, start: Path | None = None) -> Settings:
    """Merge the settings.

    `given` are those of the command line (None = not given). `file` names the file; without it, the
    file is searched for from `start` (the working directory) upwards. UsageError for anything that
    is wrong.
    """
    own = {key: value for key, value in given.items() if value is not None}
    if str(own.get("connector", "")).startswith(named.PREFIX):
        # the entry has its own settings; a file found here would be another connector's
        entry = named.named(own["connector"])
        own = {**entry.settings, **own, "connector": entry.connector, "catalogue": own["connector"]}
        start = Path("/")
    path: Path | None
    if file:
        path, found = _read_named(Path(file))
    else:
        path, found = _search((start or Path.cwd()).resolve())
    settings = _validate(found, str(path)) if path else Settings()
    given_here = _validate(own, COMMAND_LINE)
    names = [key.replace("-", "_") for key in own]
    merged = settings.model_copy(update={name: getattr(given_here, name) for name in names})
    asked = {name for name, value in given.items() if value is not None}
    if {"select", "trace"} <= asked:
        raise UsageError("--trace and -k cannot be combined: --trace names the case that is run")
    if "trace" in asked or "cases" in asked and "select" not in asked:
        merged.select = []  # what a file selects is not meant
    merged.expected_failures = settings.expected_failures
    merged.file = str(path) if path else None
    if merged.connector == REFERENCE and not merged.extra_config:
        merged.extra_config = {"store": "{tmp}"}
        merged.extra_config_after_restart = merged.extra_config_after_restart or {"codec": "int8"}
    for name in ("extra_config", "extra_config_after_restart"):
        _check_placeholders(name, json.dumps(getattr(merged, name)))

    def absolute(path: str, setting: str) -> str:
        base = Path.cwd() if setting in own else merged.base
        return str((base / Path(path).expanduser()).resolve())

    merged.report_dir = absolute(merged.report_dir, "report_dir")
    merged.pythonpath = [absolute(path, "pythonpath") for path in merged.pythonpath]
    merged.cases = [absolute(path, "cases") for path in merged.cases]
    if merged.cases and merged.shard:
        raise UsageError(
            "--case and --shard cannot be combined: kvconform merge knows the suite's cases only"
        )
    return merged


def _check_placeholders(setting: str, text: str) -> None:
    """Raise UsageError for what looks like a misspelt placeholder: the run would take it as is."""
    for name in re.findall(rf"\{{({'|'.join(PLACEHOLDERS)})\b(?!\}})", text):
        raise UsageError(f"{setting}: the placeholder {{{name}}} lacks its closing brace")
    for name in re.findall(r"\{(\w+)\}", text):
        close = difflib.get_close_matches(name, PLACEHOLDERS, 1, 0.66)
        if close and name not in PLACEHOLDERS:
            raise UsageError(
                f"{setting}: there is no placeholder {{{name}}}; did you mean {{{close[0]}}}?"
            )


def _read_named(path: Path) -> tuple[Path, dict[str, Any]]:
    if path.is_dir():
        raise UsageError(f"{path} is a directory; name the settings file in it")
    if not path.is_file():
        raise UsageError(f"there is no settings file {path}")
    found = _table(path)
    if found is None:
        raise UsageError(f"{path} has no table [tool.kvconform]")
    return path.resolve(), found


def _search(start: Path) -> tuple[Path | None, dict[str, Any]]:
    """Return the nearest file with settings, up to the root of the repository, and its settings."""
    for folder in (start, *start.parents):
        for name in ("kvconform.toml", "pyproject.toml"):
            if (folder / name).is_file():
                found = _table(folder / name)
                if found is not None:
                    return folder / name, found
        if (folder / ".git").exists():
            break
    return None, {}


def _table(path: Path) -> dict[str, Any] | None:
    """Return the settings in a file; None for a pyproject.toml without any."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        content = path.read_bytes().decode(errors="replace")
        if path.name == "pyproject.toml" and "kvconform" not in content:
            return None  # it is broken, but has no settings of ours
        raise broken_toml(path, error) from None
    if path.name != "pyproject.toml":
        return data
    table = data.get("tool", {}).get("kvconform")
    return table if isinstance(table, dict) else None


def _validate(raw: dict[str, Any], place: str) -> Settings:
    """Return the settings. UsageError with a line for each one that is wrong."""
    known = set(Settings.model_fields) - {"file"}
    if place != COMMAND_LINE:
        known -= {"arguments", "catalogue"}
    data = {}
    wrong: dict[str, str] = {}
    for key, value in raw.items():
        name = key.replace("-", "_")
        if name in known:
            data[name] = value
        else:
            close = did_you_mean(name, known, 1, quoted=True)
            wrong[name] = f"{place}: unknown setting {key!r}{close}"
    if isinstance(data.get("expected_failures"), list):
        data["expected_failures"] = [_dates_as_text(entry) for entry in data["expected_failures"]]
    where = "" if place == COMMAND_LINE else f"{place}: "
    settings = None
    try:
        settings = Settings.model_validate(data)
    except UsageError as error:
        raise UsageError(f"{where}{error.message}") from None
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            at = problem["loc"]
            is_entry = len(at) > 1 and isinstance(at[1], int)  # others have an error for each type
            wrong.setdefault(str(at if is_entry else at[0]), _in_a_sentence(problem, place))
    try:
        if "capabilities" not in wrong:
            complete(data.get("capabilities", {}))
    except UsageError as error:
        wrong["capabilities"] = f"{where}{error.message}"
    if wrong or settings is None:
        raise UsageError("\n".join(wrong.values()))
    return settings


def _in_a_sentence(problem: Any, place: str) -> str:
    """Return what pydantic found wrong with one setting, and where it is written."""
    name, *below = map(str, problem["loc"])
    if place == COMMAND_LINE:
        where = "--" + _REPEATED.get(name, name).replace("_", "-")
    else:
        where = f"{place}: {'.'.join([name, *below])}"
    sentence = in_words(problem["type"], problem["msg"])
    given = f" (it is {problem['input']!r})"
    if problem["type"] in ("missing", "extra_forbidden"):
        given = ""
    return f"{where}: {sentence[0].lower()}{sentence[1:]}{given}"


def _dates_as_text(entry: Any) -> Any:
    """Return a table of TOML with its dates as ISO text, which the model needs."""
    if not isinstance(entry, dict):
        return entry
    return {
        key: value.isoformat() if isinstance(value, date) else value for key, value in entry.items()
    }


def as_arguments(options: Mapping[str, str | bool | float | Sequence[str] | None]) -> list[str]:
    """Return options as they are written on the command line.

    A value follows its option, true is the option alone, a list repeats the option.
    """
    found: list[str] = []
    for name, value in options.items():
        if isinstance(value, str):
            found += [name, value]
        elif isinstance(value, bool):
            found += [name] if value else []
        elif isinstance(value, (int, float)):
            found += [name, str(value)]
        else:
            found += [part for each in value or () for part in (name, each)]
    return found


def parse_extra_config(text: str) -> dict[str, Any]:
    """Parse the value of --extra-config: a JSON object, or `@file` with one.

    UsageError in one sentence.
    """
    name = "--extra-config"
    if text.startswith("@"):
        name = text[1:]
        try:
            text = Path(name).read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"--extra-config: {name} cannot be read: {error.strerror or error}"
            ) from None
        except UnicodeDecodeError as error:
            raise UsageError(f"--extra-config: {name} is not UTF-8: {error}") from None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{name} is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    if not isinstance(value, dict):
        raise UsageError(f"{name} must be a JSON object, not {json.dumps(value)[:60]}")
    return value
