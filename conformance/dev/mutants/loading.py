# SPDX-License-Identifier: Apache-2.0
"""Import of a mutated module, in this process and in the interpreters that it starts.

Nothing is written to where the module lies. This module must import nothing heavy: every
interpreter that a mutant starts imports it first.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

VARIABLE = "KVCONFORM_MUTANT"
"""Environment variable: path of the JSON file that names the mutated module and its source."""
_START = """\
from kvconform.dev.mutants.loading import install_from_environment

install_from_environment()
"""


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads the mutated source as if it were in the original's file; no bytecode is kept."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType | None:
        code: CodeType = compile(self._source, self.path, "exec", dont_inherit=True)
        return code


class _Finder:
    """Finds the mutated module, and no other."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        self._name, self._path, self._source = name, path, source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> Any:
        """Return the spec of the mutated module; None for every other one."""
        if fullname != self._name:
            return None
        loader = _Loader(fullname, self._path, self._source)
        return importlib.util.spec_from_file_location(fullname, self._path, loader=loader)


def install(name: str, path: str, source: bytes) -> None:
    """Have `import name` load this source from now on, in this process."""
    sys.meta_path.insert(0, _Finder(name, path, source))


def forget(names: Iterable[str]) -> None:
    """Remove modules, so that the next import loads them again."""
    for name in names:
        if sys.modules.pop(name, None) is None:
            continue
        package, _, last = name.rpartition(".")
        if package in sys.modules:
            vars(sys.modules[package]).pop(last, None)


def install_everywhere(name: str, path: str, source: bytes, folder: Path) -> None:
    """Install the mutated module here, and in the interpreters that this process starts.

    `folder` gets a `sitecustomize.py` for them, and becomes the first one of PYTHONPATH.
    """
    install(name, path, source)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "source").write_bytes(source)
    given = {"name": name, "path": path, "source": str(folder / "source")}
    (folder / "mutant.json").write_text(json.dumps(given), encoding="utf-8")
    (folder / "sitecustomize.py").write_text(_START, encoding="utf-8")
    os.environ[VARIABLE] = str(folder / "mutant.json")
    others = [*filter(None, [os.environ.get("PYTHONPATH")]), *_where_kvconform_is()]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *others])


def _where_kvconform_is() -> list[str]:
    package = sys.modules["kvconform"]
    return [str(Path(str(package.__file__)).parent.parent)]


def install_from_environment() -> None:
    """Install the mutated module that the environment names; `sitecustomize` calls this."""
    place = os.environ.get(VARIABLE)
    if place is None:
        return
    given = json.loads(Path(place).read_text(encoding="utf-8"))
    install(given["name"], given["path"], Path(given["source"]).read_bytes())
