# SPDX-License-Identifier: Apache-2.0
"""Digests of the cited places: what changes one, and that a vLLM which says something else is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvconform import catalog, coverage, evidence, sources
from kvconform.lint import lint
from kvconform.load import Spec, load_spec

FILE = "v1/core/sched/scheduler.py"
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
        (tmp_path / "_version.py").write_text("version = '0.32.0+cpu'\n", encoding="utf-8")
        sources._symbols.cache_clear()
        sources.vllm_version.cache_clear()

    monkeypatch.setattr(sources, "vllm_root", lambda: tmp_path)
    monkeypatch.setattr(coverage, "table", lambda spec: [coverage.Row("reset_cache", [], None)])
    yield install
    sources._symbols.cache_clear()
    sources.vllm_version.cache_clear()


def small(*symbols: str) -> Spec:
    """A specification whose requirements `first`, `second`, ... rest on these symbols of FILE."""
    names = ("first", "second", "third")
    some = next(iter(load_spec().requirements.values()))
    found = {
        name: some.model_copy(update={"id": name, "since": None, "until": None, "source": evidence.Source(file=FILE, symbol=symbol)})
        for name, symbol in zip(names, symbols, strict=False)
    }
    return Spec(requirements=found)


def test_the_text_of_a_symbol(vllm: Callable[[str], None]) -> None:
    vllm(SCHEDULER)
    assert sources.text(FILE, "Scheduler.schedule") == "@cached\ndef schedule(self):\n    # why\n    return 1"
    assert sources.text(FILE, "Scheduler.land") == "def land(self): ...\ndef land(self, more): ..."
    assert sources.text(FILE, "Scheduler.gone") is None and sources.text("v1/gone.py", "Scheduler") is None


def test_what_changes_a_digest(vllm: Callable[[str], None]) -> None:
    def digests(text: str) -> list[str]:
        vllm(text)
        return [evidence.digest(sources.text(FILE, f"Scheduler.{name}") or "") for name in ("schedule", "land")]

    schedule, land = digests(SCHEDULER)
    assert digests("# moved\n\n" + SCHEDULER.replace("# why", "# why   ")) == [schedule, land]
    for old, new in (("return 1", "return 2"), ("# why", "# because"), ("@cached", "@lru_cache")):
        changed, same = digests(SCHEDULER.replace(old, new))
        assert changed != schedule and same == land


def test_another_vllm_is_compared(vllm: Callable[[str], None]) -> None:
    spec = small("Scheduler.schedule", "Scheduler.land")
    vllm(SCHEDULER)
    unread = evidence.drift(spec)
    assert len(unread.unread) == 2 and not unread.same
    spec.sources = evidence.collect(spec)
    assert evidence.drift(spec).same == 2
    vllm(SCHEDULER.replace("return 1", "return 2").replace("def land", "def lands"))
    found = evidence.drift(spec)
    assert found.changed == {f"{FILE}: Scheduler.schedule": ["first"]}
    assert found.vanished == {f"{FILE}: Scheduler.land": ["second"]}
    assert found.untouched == ["reset_cache"] and not found.same and found
    told = evidence.report(found, spec)
    assert all(word in told for word in ("changed", "Scheduler.schedule", "first", "gone", "Scheduler.land", "second", "reset_cache"))
    assert evidence.collect(spec)[f"{FILE}: Scheduler.land"] == spec.sources[f"{FILE}: Scheduler.land"]


def test_the_command_fails_when_there_is_something_to_read(
    vllm: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = small("Scheduler.schedule")
    monkeypatch.setattr(catalog, "load_spec", lambda: spec)
    monkeypatch.setattr(coverage, "table", lambda spec: [])
    vllm(SCHEDULER)
    spec.sources = evidence.collect(spec)
    assert catalog.drift() == 0
    vllm(SCHEDULER.replace("return 1", "return 2"))
    assert catalog.drift() == 1
    assert "Scheduler.schedule" in capsys.readouterr().out


def test_what_is_not_in_force_is_not_missed(vllm: Callable[[str], None]) -> None:
    spec = small("Scheduler.gone")
    vllm(SCHEDULER)
    assert evidence.drift(spec).vanished
    spec.requirements["first"] = spec.requirements["first"].model_copy(update={"since": "0.33"})
    assert not evidence.drift(spec).vanished


def test_lint_names_what_has_no_digest(vllm: Callable[[str], None]) -> None:
    vllm(SCHEDULER)
    spec = small("Scheduler.schedule", "Scheduler.land")
    spec.sources = evidence.collect(spec)
    del spec.requirements["second"]
    spec.requirements["first"] = spec.requirements["first"].model_copy(update={"source": evidence.Source(file=FILE, symbol="Scheduler")})
    found = [finding.message for finding in lint(spec) if finding.code == "L030"]
    assert len(found) == 3
    assert all(
        any(words in message for message in found) for words in ("first: ", "Scheduler.land any more", "Scheduler.schedule any more")
    )


def test_every_requirement_has_a_digest() -> None:
    spec = load_spec()
    assert evidence.cited(spec).keys() == spec.sources.keys()
    assert sum(map(len, evidence.cited(spec).values())) == len(spec.requirements)


@pytest.mark.skipif((sources.vllm_version() or "").split("+")[0] != "0.32.0", reason="the version that was read is another")
def test_the_digests_are_those_of_the_version_that_was_read() -> None:
    spec = load_spec()
    assert evidence.render(evidence.collect(spec)) == evidence.render(spec.sources)
    found = evidence.drift(spec)
    assert not (found.changed or found.vanished or found.unread)
