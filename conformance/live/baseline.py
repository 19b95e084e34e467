# SPDX-License-Identifier: Apache-2.0
"""Runs without connector: made once, kept for all who compare with them."""

from __future__ import annotations

import atexit
import fcntl
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvconform.contract.scenario import Start
from kvconform.fixtures.tiny_llama import make
from kvconform.live.engine import make_run
from kvconform.live.job import Outcome, Play

FOLDER = "KVCONFORM_LIVE_PLAINS"
"""Environment variable: the directory where the processes of one program keep them, which goes when it ends; or one that the caller has
named, for several programs one after the other: runs without connector are made once then, and stay."""
PLAIN = Start()
"""How vLLM is started for the run that all scenarios with the same prompts are compared with."""


class Plains:
    """The runs without connector, kept in `folder` for all who compare with the same one."""

    def __init__(self, folder: Path, vllm: str) -> None:
        self.folder, self.vllm = folder, vllm

    @property
    def model(self) -> Path:
        """The tiny model's directory."""
        return make(self.folder / "tiny-llama")

    def get(self, plays: list[Play], start: Start = PLAIN) -> tuple[Outcome, Path]:
        """What vLLM answers without a connector, and the book of its KV. Made now, unless some process has made it. RuntimeError if vLLM
        does not come through.
        """
        text = repr(
            (
                self.vllm,
                start.model_dump_json(),
                [play.model_dump_json(exclude={"hits"}) for play in plays],
            )
        )
        here = self.folder / f"plain-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        with _locked(here):
            done = here / "done.jsonl"
            if not done.is_file():
                shutil.rmtree(here / "run", ignore_errors=True)
                made = make_run(
                    start, plays, None, tmp=here / "run", model=self.model, book=here / "book"
                )
                if not made.outcome.ended:
                    why = (
                        made.outcome.error["text"]
                        if made.outcome.error
                        else f"{made.ended.how} after {made.ended.seconds:.0f} s"
                    )
                    raise RuntimeError(
                        f"vLLM without a connector does not come through: {why}\n{made.words}"
                    )
                with (here / "run" / "out.jsonl").open("a", encoding="utf-8") as file:
                    file.write(
                        json.dumps({"kind": "note", "seconds": made.ended.seconds}) + "\n"
                    )  # how fast this machine is
                (here / "run" / "out.jsonl").rename(done)
                shutil.rmtree(here / "run", ignore_errors=True)
        return Outcome.read(done), here / "book"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def _own_folder() -> Path:
    """For a program that has named none."""
    folder = Path(tempfile.mkdtemp(prefix="kvconform-live-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def plains() -> Plains:
    """Those of this program."""
    from kvconform.compat.installed import check_vllm

    return Plains(
        Path(os.environ[FOLDER]) if os.environ.get(FOLDER) else _own_folder(), check_vllm()[0]
    )
