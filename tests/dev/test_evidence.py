# SPDX-License-Identifier: Apache-2.0
"""Tests of the digests of cited places: what changes them, and that a changed vLLM is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvconform import commands
from kvconform.compat import installed, interface
from kvconform.contract import references, requirement
from kvconform.contract.loader import Spec, load_spec
from kvconform.dev import coverage, drift
from kvconform.dev.lint import lint
from kvconform.errors import UsageError

FILE = "v1/core/sched/scheduler.py"
INTERFACE = """
class SupportsHMA(ABC):
    @abstractmethod
    def request_finished_all_groups(self, request: "Request") \
-> tuple[bool, Optional[dict[str, Any]]]: ...

class KVConnectorBase_V1(ABC):
    def __init__(self, vllm_config): ...

    @property
    def role(self) -> KVConnectorRole: ...

    @classmethod
    def layout(cls, config): ...

    @abstractmethod
    def save(self, layer: str, *, wait=True): ...

    def _own(self): ...
"""
SCHEDULER = """
import x

class Scheduler:
    @cached
    def schedule(self):
        # why
        return 1

    if x:
        def land(self): ...
    else:
        def land(self, more): ...
"""


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Installs a vLLM 0.32.0 whose only file has this text."""

    def install(text: str) -> None:
        (tmp_path / FILE).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / FILE).write_text(text, encoding="utf-8")
        installed._symbols.cache_clear()

    (tmp_path / interface.BASE).parent.mkdir(parents=True)
    (tmp_path / interface.BASE).write_text(INTERFACE, encoding="utf-8")
    monkeypatch.setattr(installed, "vllm_root", lambda: tmp_path)
    monkeypatch.setattr(installed, "vllm_version", lambda: "0.32.0+cpu")
    known = drift.collect_hooks("0.32.0")
    monkeypatch.setattr(drift, "read_hooks", lambda: known)
    monkeypatch.setattr(coverage, "table", lambda spec: [coverage.Row("reset_cache", [], None)])
    yield install
    installed._symbols.cache_clear()


def small(*symbols: str) -> Spec:
    """A specification whose requirements `first`, `second`, ... rest on these symbols of FILE."""
    names = ("first", "second", "third")
    some = next(iter(load_spec().requirements.values()))
    found = {
        name: some.model_copy(
            update={
                "id": name,
                "since": None,
                "until": None,
                "source": requirement.Source(file=FILE, symbol=symbol),
            }
        )
        for name, symbol in zip(names, symbols, strict=False)
    }
    return Spec(requirements=found)


def test_the_text_of_a_symbol(vllm: Callable[[str], None]) -> None:
    vllm(SCHEDULER)
    assert (
        installed.text(FILE, "Scheduler.schedule")
        == "@cached\ndef schedule(self):\n    # why\n    return 1"
    )
    assert (
        installed.text(FILE, "Scheduler.land") == "def land(self): ...\ndef land(self, more): ..."
    )
    assert (
        installed.text(FILE, "Scheduler.gone") is None
        and installed.text("v1/gone.py", "Scheduler") is None
    )


def test_what_changes_a_digest(vllm: Callable[[str], None]) -> None:
    def digests(text: str) -> list[str]:
        vllm(text)
        return [
            references.digest(installed.text(FILE, f"Scheduler.{name}") or "")
            for name in ("schedule", "land")
        ]

    schedule, land = digests(SCHEDULER)
    assert digests("# moved\n\n" + SCHEDULER.replace("# why", "# why   ")) == [schedule, land]
    for old, new in (("return 1", "return 2"), ("# why", "# because"), ("@cached", "@lru_cache")):
        changed, same = digests(SCHEDULER.replace(old, new))
        assert changed != schedule and same == land


def test_another_vllm_is_compared(vllm: Callable[[str], None]) -> None:
    spec = small("Scheduler.schedule", "Scheduler.land")
    vllm(SCHEDULER)
    unread = drift.drift(spec)
    assert len(unread.unread) == 2 and not unread.same
    spec.sources = drift.collect(spec)
    assert drift.drift(spec).same == 2
    vllm(SCHEDULER.replace("return 1", "return 2").replace("def land", "def lands"))
    found = drift.drift(spec)
    assert found.changed == {f"{FILE}: Scheduler.schedule": ["first"]}
    assert found.vanished == {f"{FILE}: Scheduler.land": ["second"]}
    assert found.untouched == ["reset_cache"] and not found.same and found
    told = drift.report(found, spec)
    assert all(
        word in told
        for word in (
            "changed",
            "Scheduler.schedule",
            "first",
            "gone",
            "Scheduler.land",
            "second",
            "reset_cache",
        )
    )
    assert drift.collect(spec)[f"{FILE}: Scheduler.land"] == spec.sources[f"{FILE}: Scheduler.land"]


def test_update_says_what_it_wrote(
    vllm: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("kvconform.contract.loader.load_spec", lambda: small("Scheduler.schedule"))
    monkeypatch.setattr("kvconform.spec.__path__", [str(tmp_path)])
    vllm(SCHEDULER)
    assert drift.main(["update"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in said] == [
        "wrote spec/sources.yaml",
        "wrote spec/hooks.yaml",
    ]
    written = {file: file.read_bytes() for file in tmp_path.glob("*.yaml")}
    assert drift.main(["update"]) == 0
    assert capsys.readouterr().out == (
        "spec/sources.yaml and spec/hooks.yaml agree with the source of the installed vLLM 0.32.0:"
        " nothing to write\n"
    )
    assert written == {file: file.read_bytes() for file in tmp_path.glob("*.yaml")}
    vllm(SCHEDULER.replace("return 1", "return 2"))
    assert drift.main(["update"]) == 0
    assert capsys.readouterr().out == "wrote spec/sources.yaml, as in vLLM 0.32.0\n"


def test_the_command_fails_when_there_is_something_to_read(
    vllm: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = small("Scheduler.schedule")
    monkeypatch.setattr(commands, "load_spec", lambda: spec)
    monkeypatch.setattr(coverage, "table", lambda spec: [])
    vllm(SCHEDULER)
    spec.sources = drift.collect(spec)
    assert commands.drift() == 0
    vllm(SCHEDULER.replace("return 1", "return 2"))
    assert commands.drift() == 1
    assert "Scheduler.schedule" in capsys.readouterr().out


def test_what_is_not_in_force_is_not_missed(vllm: Callable[[str], None]) -> None:
    spec = small("Scheduler.gone")
    vllm(SCHEDULER)
    assert drift.drift(spec).vanished
    spec.requirements["first"] = spec.requirements["first"].model_copy(update={"since": "0.33"})
    assert not drift.drift(spec).vanished


def test_lint_names_what_has_no_digest(vllm: Callable[[str], None]) -> None:
    vllm(SCHEDULER)
    spec = small("Scheduler.schedule", "Scheduler.land")
    spec.sources = drift.collect(spec)
    del spec.requirements["second"]
    spec.requirements["first"] = spec.requirements["first"].model_copy(
        update={"source": requirement.Source(file=FILE, symbol="Scheduler")}
    )
    found = [finding.message for finding in lint(spec) if finding.code == "L030"]
    assert len(found) == 3
    assert all(
        any(words in message for message in found)
        for words in ("first: ", "Scheduler.land any more", "Scheduler.schedule any more")
    )


def test_what_a_signature_says(vllm: Callable[[str], None]) -> None:
    assert interface.signatures() == {
        "request_finished_all_groups": (
            "abstractmethod (self, request: Request) -> tuple[bool, dict[str, Any] | None]"
        ),
        "KVConnectorBase_V1.__init__": "(self, vllm_config)",
        "role": "property (self) -> KVConnectorRole",
        "layout": "classmethod (cls, config)",
        "save": "abstractmethod (self, layer: str, *, wait=True)",
    }


def test_another_interface_is_compared(vllm: Callable[[str], None], tmp_path: Path) -> None:
    vllm(SCHEDULER)
    spec = small("Scheduler.schedule", "Scheduler.land")
    spec.sources = drift.collect(spec)
    spec.requirements["first"] = spec.requirements["first"].model_copy(
        update={"touches": ["layout", "fresh"]}
    )
    spec.requirements["second"] = spec.requirements["second"].model_copy(
        update={"touches": ["save"]}
    )
    assert not drift.drift(spec).hooks
    text = (
        INTERFACE.replace("def layout(cls", "def placing(cls")
        .replace("wait=True", "wait=False")
        .replace("def _own", "def fresh")
    )
    (tmp_path / interface.BASE).write_text(text, encoding="utf-8")
    found = drift.drift(spec)
    assert found.hooks.new == {"placing": [], "fresh": ["first"]}
    assert found.hooks.gone == {"layout": ["first"]}
    was, now, names = found.hooks.changed["save"]
    assert (was.endswith("wait=True)"), now.endswith("wait=False)"), names) == (
        True,
        True,
        ["second"],
    )
    assert found
    told = drift.report(found, spec)
    for words in (
        "without a requirement (1)\n  placing",
        "with a requirement (1)\n  fresh\n    first",
        "does not have (1)\n  layout\n    first",
        now,
    ):
        assert words in told


def test_what_an_older_release_does_not_have_yet(
    vllm: Callable[[str], None], tmp_path: Path
) -> None:
    vllm(SCHEDULER)
    spec = small("Scheduler.schedule")
    spec.requirements["first"] = spec.requirements["first"].model_copy(
        update={"touches": ["layout"], "since": "0.32"}
    )
    (tmp_path / interface.BASE).write_text(
        INTERFACE.replace("def layout", "def _layout"), encoding="utf-8"
    )
    assert drift.hook_drift(spec, drift.read_hooks(), "0.32.0").gone == {"layout": ["first"]}
    assert not drift.hook_drift(spec, drift.read_hooks(), "0.31.0")
    assert drift.hook_drift(small("Scheduler.schedule"), drift.read_hooks(), "0.33.0").gone == {
        "layout": []
    }


def test_the_file_of_hooks(
    vllm: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hooks = drift.collect_hooks("0.32.0")
    monkeypatch.undo()
    monkeypatch.setattr(drift.importlib.resources, "files", lambda package: tmp_path)
    (tmp_path / "hooks.yaml").write_text(drift.render_hooks(hooks), encoding="utf-8")
    assert drift.read_hooks() == hooks
    (tmp_path / "hooks.yaml").write_text("- {hook: save}\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"spec/hooks.yaml: Field required"):
        drift.read_hooks()
    (tmp_path / "hooks.yaml").unlink()
    with pytest.raises(UsageError, match=r"there is no spec/hooks.yaml"):
        drift.read_hooks()


def test_every_requirement_has_a_digest() -> None:
    spec = load_spec()
    assert drift.cited(spec).keys() == spec.sources.keys()
    cites = len(spec.requirements) + len(spec.situations)
    assert sum(map(len, drift.cited(spec).values())) == cites


@pytest.mark.skipif(
    (installed.vllm_version() or "").split("+")[0] != "0.32.0",
    reason="the version that was read is another",
)
def test_the_digests_are_those_of_the_version_that_was_read() -> None:
    spec = load_spec()
    assert drift.render(drift.collect(spec)) == drift.render(spec.sources)
    found = drift.drift(spec)
    assert not (found.changed or found.vanished or found.unread or found.hooks)
    assert drift.render_hooks(drift.collect_hooks("0.32.0")) == drift.render_hooks(
        drift.read_hooks()
    )
