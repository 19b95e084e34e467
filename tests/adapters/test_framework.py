# SPDX-License-Identifier: Apache-2.0
"""Tests of adapters in general: names, settings and reports, one installation per process."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from kvconform.adapters import registry as adapters
from kvconform.adapters.registry import Adapter
from kvconform.config.settings import load
from kvconform.errors import UsageError


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the adapter `stand-in` did, in order."""
    done: list[str] = []

    @contextmanager
    def around() -> Iterator[None]:
        done.append("begin")
        yield
        done.append("end")

    adapter = Adapter(
        "Stand-in for json", "It does nothing.", "json", lambda: done.append("install"), around
    )
    module = SimpleNamespace(ADAPTER=adapter)
    monkeypatch.setitem(sys.modules, "kvconform.adapters.stand_in", module)
    monkeypatch.setattr(adapters, "names", lambda: ["other", "stand-in"])
    monkeypatch.setattr(adapters, "_installed", {})
    return done


def test_an_adapter_is_installed_once_and_entered_for_each_run(made: list[str]) -> None:
    for _ in range(2):
        with adapters.in_force(["stand-in"]):
            made.append("run")
    assert made == ["install", "begin", "run", "end", "begin", "run", "end"]


def test_processes_that_vllm_starts_are_told_by_the_environment(
    made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters.install_from_environment()
    assert made == []
    monkeypatch.setenv(adapters.ENVIRONMENT, "stand-in")
    adapters.install_from_environment()
    assert made == ["install"]


def test_a_name_that_does_not_exist_is_one_sentence(made: list[str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^there is no adapter 'standin'; did you mean stand-in"):
        adapters.install(["standin"])
    (tmp_path / "kvconform.toml").write_text('adapters = ["standin"]\n')
    with pytest.raises(UsageError, match="there is no adapter 'standin'"):
        load({}, start=tmp_path)
    assert made == []


def test_an_adapter_for_what_is_not_there(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Adapter(
        "Stand-in for nothing",
        "It does nothing.",
        "package_that_is_nowhere",
        lambda: made.append("install"),
    )
    monkeypatch.setitem(sys.modules, "kvconform.adapters.other", SimpleNamespace(ADAPTER=missing))
    with pytest.raises(
        UsageError,
        match="adapter other needs the package package_that_is_nowhere, which is not installed",
    ):
        adapters.install(["other"])
    assert made == []


def test_the_report_names_it(made: list[str]) -> None:
    from kvconform.config.selection import select
    from kvconform.contract.loader import load_spec
    from kvconform.report import jsonl, terminal
    from kvconform.report.collector import Collector

    settings = load({"adapters": ["stand-in"], "select": ["lifecycle.api"]}, start=Path("/"))
    spec, out = load_spec(), io.StringIO()
    collector = Collector(spec, settings, select(spec, settings, "0.32.0"), "0.32.0")
    terminal.header(Console(file=out, width=130), collector, [])
    assert (
        "adapter     Stand-in for json (stand-in): what it does wrong is not the connector's fault"
        in out.getvalue()
    )
    assert jsonl.header_of(collector, []).adapters == ["Stand-in for json (stand-in)"]


@pytest.mark.parametrize("name", adapters.names())
def test_every_adapter_is_described_and_imports_nothing_before_it_is_installed(name: str) -> None:
    adapter = adapters.named(name)
    assert adapter.title and adapter.text.endswith(".")
    loaded = f"{{'torch', 'vllm', {adapter.package!r}}} & {{*sys.modules}}"
    code = (
        f"import sys; from kvconform.adapters import registry; registry.named({name!r}); "
        f"print({loaded})"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"
