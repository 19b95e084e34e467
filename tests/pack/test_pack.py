# SPDX-License-Identifier: Apache-2.0
"""Tests of `kvconform pack`, with a folder of tiny wheels in place of a package index."""

from __future__ import annotations

import configparser
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kvconform.errors import EnvironmentProblem, UsageError
from kvconform.pack import build, fetch, launch, unpacked, wheels
from kvconform.pack.compiled import Capability
from kvconform.pack.fetch import Target
from kvconform.pack.wheels import Part

HERE = "{}.{}".format(*sys.version_info)
TARGET = Target(HERE, "manylinux_2_28_x86_64")
COMPILED = {"vllm/_C.abi3.so": b"\x7fELF" * 1000, "vllm/vllm-rs": b"\x7fELF", "vllm/a.cuh": b""}
RULES = build.Parts(
    imported=["numpy", "absent-on-mars"],
    left_out=["hf-xet"],
    computing=["left-pad", "right-pad"],
    stand_ins={"kvconform_none": "none", "json": "simplejson"},
    there={"torch": "2.0", "triton": "3.6"},
)


def wheel(folder: Path, name: str, version: str, files: dict[str, bytes], *requires: str) -> Path:
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    lines += [f"Requires-Dist: {each}" for each in requires]
    metadata = f"{name}-{version}.dist-info/METADATA"
    entries = {**files, metadata: ("\n".join(lines) + "\n").encode()}
    return wheels.write(folder, name, version, entries.items())


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Tiny wheels of vLLM and of what it needs; no other index."""
    folder = tmp_path / "index"
    folder.mkdir()
    needs = ("numpy>=2", "torch==2.13.0", "flashinfer", 'absent-on-mars; sys_platform == "mars"')
    wheel(folder, "vllm", "0.32.0", {"vllm/__init__.py": b"", **COMPILED}, *needs)
    wheel(folder, "numpy", "2.5.0", {"numpy/__init__.py": b""}, "hf-xet")
    wheel(folder, "hf_xet", "1.0", {"hf_xet/__init__.py": b""})
    for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr(build, "parts", lambda: RULES)
    # kvconform's own requirements would need an index.
    monkeypatch.setattr(build, "ours", lambda: [])
    return str(folder)


def packed(
    index: str, out: Path, *, most: float = 60, gpu: Capability | None = None, **have: str
) -> build.Pack:
    return build.build("0.32.0", out, TARGET, have=have, most=most, links=[index], capability=gpu)


def test_a_pack_has_kvconform_and_the_python_part_of_vllm(index: str, tmp_path: Path) -> None:
    out = tmp_path / "pack"
    made = packed(index, out)
    assert {part.name for part in made.parts} == {"kvconform", "vllm", "numpy"}
    assert made.size == wheels.total(out)
    with zipfile.ZipFile(next(out.glob("vllm-*.whl"))) as archive:
        assert "vllm/__init__.py" in archive.namelist()
        assert not set(COMPILED) & set(archive.namelist())
    with zipfile.ZipFile(next(out.glob("kvconform-*.whl"))) as archive:
        names = archive.namelist()
    assert {"kvconform/cli.py", "kvconform/refimpl/__init__.py"} <= set(names)
    tests = {"kernels/test_kernels.py", "rigs/drawn.py", "rigs/places.py", "rigs/compiling.py"}
    assert {f"{wheels.TESTS}/{name}" for name in tests} <= set(names)
    assert not [name for name in names if "__pycache__" in name]


def test_a_pack_for_a_gpu_has_the_compiled_parts_and_what_they_need(
    index: str, tmp_path: Path
) -> None:
    library = "vllm/_C_stable_libtorch.abi3.so"
    files = {"vllm/__init__.py": b"", library: b"host", "vllm/_flashmla_C.abi3.so": b"host"}
    wheel(Path(index), "vllm", "0.32.0", files, "numpy>=2", "left-pad<2")
    wheel(Path(index), "left_pad", "1.0", {"left_pad.py": b""}, "torch")
    wheel(Path(index), "left_pad", "2.0", {"left_pad.py": b""})
    wheel(Path(index), "right_pad", "1.0", {"right_pad.py": b""})
    out = tmp_path / "pack"
    made = packed(index, out, gpu=Capability(9, 0))
    assert {(part.name, part.version) for part in made.parts if "pad" in part.name} == {
        ("left-pad", "1.0"),
        ("right-pad", "1.0"),
    }
    with zipfile.ZipFile(next(out.glob("vllm-*.whl"))) as archive:
        assert {name for name in archive.namelist() if name.endswith(".so")} == {library}
    assert json.loads((out / launch.MANIFEST).read_text(encoding="utf-8"))["capability"] == "9.0"


def test_compiled_parts_for_one_torch_only_are_refused(index: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="need the torch that they were built with"):
        packed(index, tmp_path / "pack", gpu=Capability(9, 0))


def test_a_gpu_that_vllm_has_no_code_for_is_refused(
    index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"vllm/__init__.py": b"", "vllm/_C_stable_libtorch.abi3.so": b"for others"}
    wheel(Path(index), "vllm", "0.32.0", files, "numpy>=2")
    monkeypatch.setattr(wheels, "thinned", lambda library, capability: None)
    with pytest.raises(UsageError, match=r"vllm 0\.32\.0 has no code for a GPU of capability 7\.0"):
        packed(index, tmp_path / "pack", gpu=Capability(7, 0))


def test_what_the_packed_tests_import_is_packed() -> None:
    plain = [build.plain(each) for each in build.ours() if build.applies(each, TARGET)]
    assert [each for each in plain if each.startswith("hypothesis")] == ["hypothesis>=6.100"]


def test_a_pack_lacks_what_the_target_has(index: str, tmp_path: Path) -> None:
    assert "numpy" not in {part.name for part in packed(index, tmp_path / "a", numpy="2.1").parts}
    # vLLM refuses this version.
    assert "numpy" in {part.name for part in packed(index, tmp_path / "b", numpy="1.26").parts}


def test_a_target_that_lacks_what_the_pack_leaves_out_is_told(
    index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "TORCH", "none")
    out = tmp_path / "pack"
    wheel(Path(index), "left_pad", "2.0", {"left_pad.py": b""})
    monkeypatch.setattr(build, "ours", lambda: [Requirement("left-pad")])
    packed(index, out, left_pad="2.0", **{"left-pad": "2.0"})
    assert not [*out.glob("left_pad*")]
    with pytest.raises(launch.CannotUnpack, match="has no left-pad, which the pack leaves out"):
        launch.unpack(out)


@pytest.mark.parametrize(
    ("words", "into"),
    [(["unpack"], "pack/site"), (["unpack", "a"], "a"), (["unpack", "--into", "a"], "a")],
)
def test_where_a_pack_unpacks_itself(
    index: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    into: str,
) -> None:
    packed(index, tmp_path / "pack")
    monkeypatch.setattr(launch, "check", lambda manifest: None)
    monkeypatch.chdir(tmp_path)
    launch.main(Path("pack"), words)
    assert f"PYTHONPATH={tmp_path / into}\n" in capsys.readouterr().out
    assert (tmp_path / into / launch.MANIFEST).is_file()


@pytest.mark.parametrize("words", [["unpack", "--into"], ["unpack", "--in", "a"], ["unpack", "-h"]])
def test_a_wrong_word_for_unpack_makes_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        launch.main(tmp_path, words)
    assert ended.value.code == launch.ENVIRONMENT
    assert "unpack --into DIR" in capsys.readouterr().err


def test_a_pack_that_is_too_big_names_its_biggest_parts(index: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"more than 0.01 MB \(kvconform \d.* MB, .*--max-mb"):
        packed(index, tmp_path / "pack", most=0.01)
    assert not (tmp_path / "pack").exists()


@pytest.mark.parametrize("below", ["", "pack"])
def test_a_file_in_the_way_is_named(index: str, tmp_path: Path, below: str) -> None:
    (tmp_path / "note").write_text("mine", encoding="utf-8")
    with pytest.raises(UsageError, match=r"--out .*note is not a directory; name another folder"):
        packed(index, tmp_path / "note" / below)


def test_a_folder_with_other_files_is_left_alone(index: str, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine", encoding="utf-8")
    with pytest.raises(UsageError, match="has files that are no pack"):
        packed(index, tmp_path)


@pytest.mark.parametrize(
    "target, sentence",
    [
        (Target("3.10", TARGET.platform), "3.10 is too old: kvconform needs 3.11"),
        (Target("three", TARGET.platform), "is no Python such as 3.12"),
        (Target(HERE, "win_amd64"), "no tag such as manylinux"),
    ],
)
def test_a_target_that_cannot_be_packed_for(target: Target, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=sentence):
        build.build("0.32.0", tmp_path / "pack", target, have={}, most=60)


def test_a_release_that_pip_does_not_find(index: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"pip finds no wheel of vllm==9\.9.*newest is 0\.32\.0"):
        build.build("9.9", tmp_path / "pack", TARGET, have={}, most=60, links=[index])
    with pytest.raises(UsageError, match=r"no wheel of vllm==0\.32\.0.*no index, --find-links"):
        build.build("0.32.0", tmp_path / "pack", TARGET, have={}, most=60)


@pytest.mark.parametrize(
    "vllm, most, sentence",
    [
        ("main", 60, "--vllm main is no release such as 0.32.0"),
        ("0.10.2", 60, "--vllm 0.10.2 is too old: kvconform supports 0.11.2 to"),
        ("0.32.0", 0, "--max-mb 0 is no size"),
    ],
)
def test_what_cannot_be_packed_is_said_before_a_download(
    vllm: str, most: float, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=sentence):
        build.build(vllm, tmp_path / "pack", TARGET, have={}, most=most)


def test_an_index_that_cannot_be_reached() -> None:
    problem = fetch._problem("WARNING: ... NewConnectionError(...)\nERROR: No matching", ["vllm"])
    assert isinstance(problem, EnvironmentProblem)
    assert "cannot be reached" in problem.message


def test_no_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match="has no pip"):
        fetch.download(["vllm"], tmp_path, [])


def test_have_takes_both_formats_of_pip(tmp_path: Path) -> None:
    file = tmp_path / "have"
    file.write_text("Package Version\n------- -----\nPyYAML  6.0\nnumpy==2.5.2\n", encoding="utf-8")
    assert build.read_have(file) == {"pyyaml": "6.0", "numpy": "2.5.2"}
    file.write_bytes("numpy 2.5.2\n".encode("utf-16"))
    with pytest.raises(UsageError, match="is no text in UTF-8"):
        build.read_have(file)
    file.write_text("nothing\n", encoding="utf-8")
    with pytest.raises(UsageError, match="has no lines such as"):
        build.read_have(file)


def test_a_pack_runs_where_only_torch_is(index: str, tmp_path: Path) -> None:
    """The pack's own program, in a Python that has nothing but a torch by name."""
    out, bare = tmp_path / "pack", tmp_path / "bare"
    packed(index, out)
    bare.mkdir()

    def run(*words: str, code: int = 0) -> str:
        command = [sys.executable, "-S", *words]
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(bare)}
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    assert "has no torch" in run(str(out), "unpack", code=3)
    wheel(bare, "torch", "1.9", {})
    with zipfile.ZipFile(bare / "torch-1.9-py3-none-any.whl") as archive:
        archive.extractall(bare)
    assert "torch 1.9 is too old" in run(str(out), "unpack", code=3)
    (bare / "torch-1.9.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.11.0+cu130\n")
    assert run(str(out), "unpack").splitlines() == [
        f"export PYTHONPATH={out / launch.SITE}",
        "# stand-ins: kvconform_none",
    ]
    assert not (out / launch.SITE / "json").exists()  # this Python has it
    site = out / launch.SITE
    assert unpacked.notes(site)[0].endswith("stand-ins: kvconform_none")
    code = f"""import sys; sys.path.insert(0, {str(site)!r})
from kvconform_none.deep import Thing
class Mine(Thing): made = Thing(1)
constant = Thing.Inner(2)
def f(x: Thing.Inner | None = None, y: Thing[int] = None) -> None: pass
def g(): Thing(1)
try:
    g()
except RuntimeError as error:
    print(error)
"""
    assert "kvconform_none.deep.Thing was called" in run("-c", code)


def test_a_pack_that_was_copied_in_part(
    index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "pack"
    packed(index, out)
    monkeypatch.setattr(launch, "check", lambda manifest: None)
    wheel = next(out.glob("numpy-*.whl"))
    wheel.write_bytes(wheel.read_bytes()[:100])
    with pytest.raises(launch.CannotUnpack, match=r"is damaged .* copy it again"):
        launch.unpack(out)
    wheel.unlink()
    with pytest.raises(
        launch.CannotUnpack, match=r"wheels that its pack.json names; copy it again"
    ):
        launch.unpack(out)
    for name in ("one", "two"):
        (out / f"{name}.whl").touch()
    with pytest.raises(launch.CannotUnpack, match="without those of another pack"):
        launch.unpack(out)
    (out / launch.MANIFEST).write_text('{"kvconform"')
    with pytest.raises(launch.CannotUnpack, match=r"pack\.json is damaged; copy it again"):
        launch.unpack(out)
    assert [path.name for path in out.iterdir() if path.is_dir()] == []


def test_two_processes_may_unpack_at_once(
    index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "pack"
    packed(index, out)
    monkeypatch.setattr(launch, "check", lambda manifest: None)
    extract = launch.extract
    others: list[Path | int] = []

    def slow(wheel: Path, site: Path) -> None:
        if not others:
            others.append(site)
            monkeypatch.setattr(launch.os, "getpid", lambda: 1)
            others.append(launch.unpack(out).stat().st_ino)
        extract(wheel, site)

    monkeypatch.setattr(launch, "extract", slow)
    assert launch.unpack(out) == out / launch.SITE
    assert (out / launch.SITE).stat().st_ino == others[1]
    assert [path for path in out.iterdir() if path.is_dir()] == [out / launch.SITE]


def test_a_checkout_is_packed_with_its_own_requirements(tmp_path: Path) -> None:
    """An installed checkout has the metadata of the day on which it was installed."""
    project = wheels.project()
    assert project is not None
    part = wheels.own(tmp_path)
    assert part.requires == [Requirement(each) for each in project["dependencies"]]
    with zipfile.ZipFile(part.path) as archive:
        points = archive.read(f"kvconform-{part.version}.dist-info/entry_points.txt").decode()
    found = configparser.ConfigParser()
    found.read_string(points)
    assert found["pytest11"]["kvconform"] == "kvconform.session.plugin"
    assert found["console_scripts"]["kvconform"] == "kvconform.cli:main"


def test_a_pack_for_another_python(index: str, tmp_path: Path) -> None:
    out = tmp_path / "pack"
    packed(index, out)
    manifest = out / launch.MANIFEST
    other = {**json.loads(manifest.read_text(encoding="utf-8")), "python": "3.99"}
    manifest.write_text(json.dumps(other), encoding="utf-8")
    with pytest.raises(launch.CannotUnpack, match=r"for Python 3\.99, and this is"):
        launch.unpack(out)


def test_requirements_of_other_platforms_do_not_count() -> None:
    part = Part(Path("vllm.whl"), "vllm", "1", [Requirement('numpy; sys_platform == "win32"')])
    assert build.requirements(part, ["numpy"], TARGET) == []


def test_a_packed_wheel_is_one_that_pip_reads(index: str, tmp_path: Path) -> None:
    packed(index, tmp_path / "pack")
    for path in (tmp_path / "pack").glob("*.whl"):
        with zipfile.ZipFile(path) as archive:
            record = next(name for name in archive.namelist() if name.endswith("/RECORD"))
            listed = {line.rsplit(",", 2)[0] for line in archive.read(record).decode().split()}
            assert set(archive.namelist()) <= listed
