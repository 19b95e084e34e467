# SPDX-License-Identifier: Apache-2.0
"""Tests of text on the terminal: its width, and what stays whole."""

from __future__ import annotations

import io
import os
import shlex

import pytest
from rich.console import Console

from kvconform.report import layout
from kvconform.report.timeline import fit, render, shorten
from kvconform.words import many


def test_the_width_is_that_of_columns_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    assert layout.make_console(io.StringIO()).width == 72
    monkeypatch.delenv("COLUMNS")
    assert layout.make_console(io.StringIO()).width == layout.WIDTH


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_command_can_be_copied(width: int) -> None:
    words = ["kvconform", "run", "pkg.module:Connector", "-k", "a.b[x-y]", "--flag"]
    words += ["--extra-config", '{"a": "b c"}', "--seed", "0"]
    out = io.StringIO()
    layout.command(Console(file=out, width=width), "reproduce", words)
    text = out.getvalue().removeprefix("reproduce")
    assert shlex.split(text.replace("\\\n", " ")) == words
    *before, last = out.getvalue().splitlines()
    assert all(len(line) <= width for line in (*before, last))
    assert all(line.endswith(" \\") for line in before) and not last.endswith("\\")
    assert (len(text.splitlines()) == 1) is (width == 200)
    assert "-k 'a.b[x-y]'" in text and "--seed 0" in text


def test_a_run_goes_on_when_nobody_reads_its_output() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", encoding="utf-8") as pipe:
        console = layout.make_console(pipe)
        for _ in range(2):
            console.print("as after `| head`")
        assert console.quiet


def test_words_stay_whole() -> None:
    word = "distributed/kv_transfer/kv_connector/v1/base.py:KVConnectorBase_V1.get-finished"
    out = io.StringIO()
    layout.paragraph(Console(file=out, width=40), "evidence", f"see {word} there")
    assert word in out.getvalue() and out.getvalue().startswith("evidence     see")
    assert fit([f"   1  worker      start {word}"], 40)[-1].strip() == word
    layout.paragraph(Console(file=out, width=40), "empty", "")
    assert "empty" not in out.getvalue()


def test_wrapped_lines_of_a_timeline_keep_their_indent() -> None:
    (first, *rest) = fit([">  4  WRONG KV    " + "word " * 30], 60)
    assert first.startswith(">  4  WRONG KV    word") and len(rest) > 1
    assert all(line.startswith(" " * 18 + "word") and len(line) <= 60 for line in rest)


def test_numbers_have_their_nouns() -> None:
    assert [many(n, "token") for n in (0, 1, 2)] == ["0 tokens", "1 token", "2 tokens"]
    assert many(2, "status") == "2 statuses"


def test_a_long_excerpt_keeps_its_beginning_and_its_end() -> None:
    lines = [f"{n:>4}  plan        save" for n in range(20)]
    lines[15] = ">" + lines[15][1:]
    assert shorten(lines, 80, 20) == lines
    shown = shorten(lines, 80, 9)
    words = [line.split()[0] for line in shown]
    assert words == ["0", "1", "2", "...", "11", "12", "13", "14", ">"]
    assert len(fit(shorten(lines, 20, 9), 20)) <= 9


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            {"kind": "request.new", "req": "a", "generation": 0},
            "request     a is new, on_new_request was called",
        ),
        (
            {
                "kind": "transfer.failed",
                "req": "a",
                "blocks": [4, 5, 9],
                "outside_grant": [9],
            },
            "failed      blocks 4-5, 9 of a, of which 9 belong to no load,",
        ),
        (
            {"kind": "transfer.failed", "req": None, "blocks": [4], "outside_grant": []},
            "failed      block 4, as the connector reports",
        ),
        (
            {"kind": "hold", "req": "b", "direction": "recv", "cause": "async load"},
            "hold        the engine waits for the load of b (async load)",
        ),
        (
            {"kind": "release", "req": "b", "direction": "send", "cause": "reported"},
            "release     the engine waits no longer for the send of b (reported)",
        ),
    ],
)
def test_events_of_requests_and_transfers_in_words(event: dict[str, object], line: str) -> None:
    assert line in render([{"seq": 0, "step": 1, **event}], None)[0]
