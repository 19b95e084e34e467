# SPDX-License-Identifier: Apache-2.0
"""Baseline runs: vLLM without a connector, made once and shared by all runs that need them."""

from __future__ import annotations

import atexit
import fcntl
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvconform.compat.installed import check_vllm
from kvconform.contract.scenario import Start
from kvconform.fixtures import tiny_blip, tiny_llama
from kvconform.live.engine import make_run
from kvconform.live.job import Outcome, Play

FOLDER = "KVCONFORM_LIVE_PLAINS"
"""Environment variable: the directory of the baseline runs.

A program sets it for its own processes to a directory that it deletes at its end. A caller that
sets it to a directory of its own keeps the baseline runs there, for several programs in a row.
"""
PLAIN = Start()
"""How vLLM is started for the baseline run of scenarios with the same model and prompts."""


class Plains:
    """The baseline runs below `folder`, shared by all processes that use the same folder."""

    def __init__(self, folder: Path, vllm: str) -> None:
        self.folder = folder
        self.vllm = vllm

    def model(self, plays: Iterable[Play] = (), start: Start = PLAIN) -> Path:
        """Return the directory of the tiny model, or of the one that the images in `plays` need."""
        if any(ask.image for play in plays for ask in play.asks):
            return tiny_blip.make(self.folder / "tiny-blip")
        if start.windows:
            return tiny_llama.make(self.folder / "tiny-llama-windows", windows=True)
        return tiny_llama.make(self.folder / "tiny-llama")

    def drafter(self, start: Start) -> Path | None:
        """Return the directory of the model that makes drafts, if there is one."""
        if not start.draft_model:
            return None
        return tiny_llama.make(self.folder / "tiny-llama-drafter", drafter=True)

    def get(self, plays: list[Play], start: Start = PLAIN) -> tuple[Outcome, Path]:
        """Return what vLLM answers without a connector, and the file of its KV (the book).

        Makes the run, unless some process has made it before. Raises RuntimeError if vLLM fails.
        """
        wanted = [play.model_dump_json(exclude={"hits"}) for play in plays]
        text = repr((self.vllm, start.model_dump_json(), wanted))
        here = self.folder / f"plain-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        with _locked(here):
            done = here / "done.jsonl"
            if not done.is_file():
                self._make(start, plays, here, done)
        return Outcome.read(done), here / "book"

    def _make(self, start: Start, plays: list[Play], here: Path, done: Path) -> None:
        """Make a baseline run below `here`. The file `done` appears once the run is complete."""
        shutil.rmtree(here / "run", ignore_errors=True)
        made = make_run(
            start,
            plays,
            None,
            tmp=here / "run",
            model=self.model(plays, start),
            drafter=self.drafter(start),
            book=here / "book",
        )
        if not made.outcome.ended:
            if made.outcome.error:
                why = made.outcome.error["text"]
            else:
                why = f"{made.ended.how} after {made.ended.seconds:.0f} s"
            raise RuntimeError(f"vLLM fails without a connector: {why}\n{made.words}")
        out = here / "run" / "out.jsonl"
        with out.open("a", encoding="utf-8") as file:
            # The time that the run took here, from which time limits of other runs follow.
            file.write(json.dumps({"kind": "note", "seconds": made.ended.seconds}) + "\n")
        out.rename(done)
        shutil.rmtree(here / "run", ignore_errors=True)


def plain_start(start: Start) -> Start:
    """Return how vLLM is started for the baseline run of a scenario: with the same model."""
    return PLAIN.model_copy(update={"windows": start.windows})


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is made if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def _own_folder() -> Path:
    """Return a folder for this process, deleted when it exits."""
    folder = Path(tempfile.mkdtemp(prefix="kvconform-live-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def plains() -> Plains:
    """Return the baseline runs in the directory that FOLDER names, or else in one of our own."""
    named = os.environ.get(FOLDER)
    return Plains(Path(named) if named else _own_folder(), check_vllm()[0])
