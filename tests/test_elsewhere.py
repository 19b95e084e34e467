# SPDX-License-Identifier: Apache-2.0
"""Runs in another interpreter: it finds what this one finds."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import indent

import pytest

pytest.importorskip("vllm")
from kvconform.case import Variant
from kvconform.elsewhere import HASH_SEED, ElsewhereError, run_elsewhere
from kvconform.plain import Plain, plain_case
from kvconform.target import Target

CONNECTOR = '''
from kvconform.refimpl.connector import ReferenceConnector


class Connector(ReferenceConnector):
    """Found through --pythonpath only."""
'''


def test_finds_a_package_that_only_pythonpath_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here_g8.py").write_text(CONNECTOR)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])  # as a worker does with --pythonpath and the setting
    variant = Variant(plain_case(Plain(9, 1, 9, 9), 4), "reference", "sync", "v1", 1, 4)
    target = Target("only_here_g8:Connector", extra_config={"store": "{tmp}"})
    run = run_elsewhere(variant, target, seed=0, tmp=tmp_path / "run", caps=None)
    assert run.harness_error is None
    assert not [e for e in run.trace if e["k"] == "engine.crash"]
    assert any(e["k"] == "run.end" and e["quiesced"] for e in run.trace)


def test_an_interpreter_that_dies_at_its_end_has_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dies = CONNECTOR + "\n\nimport atexit, os, signal\n\natexit.register(os.kill, os.getpid(), signal.SIGKILL)\n"
    (tmp_path / "dies_at_its_end.py").write_text(
        f"import os\nif os.environ.get('PYTHONHASHSEED') == '{HASH_SEED}':\n" + indent(dies, "    ")
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    variant = Variant(plain_case(Plain(9, 1, 9, 9), 4), "reference", "sync", "v1", 1, 4)
    target = Target("dies_at_its_end:Connector", extra_config={"store": "{tmp}"})
    assert run_elsewhere(variant, target, seed=0, tmp=tmp_path / "run", caps=None).trace


def test_an_interpreter_that_dies_before_it_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dies_at_once.py").write_text(f"{CONNECTOR}\n\nimport os, signal\n\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    variant = Variant(plain_case(Plain(9, 1, 9, 9), 4), "reference", "sync", "v1", 1, 4)
    with pytest.raises(ElsewhereError, match="another hash seed"):
        run_elsewhere(variant, Target("dies_at_once:Connector"), seed=0, tmp=tmp_path / "run", caps=None)
