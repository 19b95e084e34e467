# SPDX-License-Identifier: Apache-2.0
"""Tests of --minutes and --seconds, which every command with a time limit takes alike."""

from __future__ import annotations

import importlib
import inspect

import pytest

from kvconform.config.limits import in_seconds
from kvconform.errors import UsageError
from kvconform.explore.cli import explore


def test_a_limit_is_in_seconds() -> None:
    assert in_seconds(None, None) is None
    assert in_seconds(1.5, None) == 90 and in_seconds(None, 1.5) == 1.5


@pytest.mark.parametrize(
    ("minutes", "seconds", "said"),
    [
        (1.0, 60.0, "name --minutes or --seconds, not both"),
        (0.0, None, "--minutes 0: a time limit is greater than 0"),
        (None, -2.0, "--seconds -2: a time limit is greater than 0"),
        (float("nan"), None, "--minutes nan: a time limit is greater than 0"),
    ],
)
def test_what_is_no_limit_is_refused(
    minutes: float | None, seconds: float | None, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        in_seconds(minutes, seconds)


@pytest.mark.parametrize("module", ["kvconform.dev.mutants.__main__", "kvconform.dev.sweep"])
def test_commands_with_options_of_typer_take_both(module: str) -> None:
    pytest.importorskip("vllm")
    command = importlib.import_module(module).main
    for each in (command, explore):
        assert {"minutes", "seconds"} <= set(inspect.signature(each).parameters)


@pytest.mark.parametrize("module", ["explore_correct", "explore_defects"])
def test_commands_with_options_of_argparse_take_both(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm")
    command = importlib.import_module(f"kvconform.dev.{module}").main
    with pytest.raises(SystemExit) as done:
        command(["--minutes", "1", "--seconds", "1"])
    assert done.value.code == 2
    assert "name --minutes or --seconds, not both" in capsys.readouterr().err
