# SPDX-License-Identifier: Apache-2.0
"""The files that judge a connector in its own repository. None that is there is touched."""

from __future__ import annotations

import importlib.resources
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from kvconform import fixtures
from kvconform.errors import EnvironmentProblem, UsageError
from kvconform.init.find import Found, options
from kvconform.init.origin import Origin

PLACES = re.compile(r"(?i)(^|[_.-])(path|dir|directory|folder|root|storage|file|location)s?$")
"""Options that say where KV is kept: a run must not find what an earlier one has left there."""

FIXTURES = Path(fixtures.__path__[0])


@dataclass(frozen=True)
class Written:
    """A file, by its path in the repository; `kept`: it was there already."""

    path: Path
    kept: bool


def template(folder: Path) -> None:
    """Copy the template connector into a new folder. UsageError if there is something in it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists: --template makes a new folder")
    try:
        shutil.copytree(
            FIXTURES / "template",
            folder,
            ignore=shutil.ignore_patterns("__pycache__"),
            dirs_exist_ok=True,
        )
    except OSError as error:
        raise EnvironmentProblem(f"{error.filename} cannot be written: {error.strerror}") from None


def settings(repository: Path, connector: str, found: Found | None) -> str:
    """kvconform.toml. `found` is None where the connector was named: nothing is known of its options then."""
    root = os.path.relpath(found.root, repository) if found else None
    if root is not None and not _writable(root):
        raise UsageError(f"the name of the folder {root!r} is no UTF-8: no settings can name it")
    rows = [_option(name, default) for name, default in options(found).items()] if found else []
    return _rendered(
        "kvconform.toml",
        connector=connector,
        pythonpath=root,
        options=rows,
        declares=found is not None and found.declares,
    )


def workflow(repository: Path, origin: Origin) -> tuple[str, str]:
    """(path, text) of what runs it in CI: GitLab's where the repository has GitLab's, else GitHub's."""
    if (repository / ".gitlab-ci.yml").is_file():
        text = (FIXTURES / "ci" / "gitlab.yml").read_text(encoding="utf-8")
        for name, value in (("KVCONFORM", origin.url), ("KVCONFORM_COMMIT", origin.commit)):
            if value:
                quoted = json.dumps(value).replace("\\", "\\\\")  # for re.sub
                text = re.sub(rf"(?m)^(  {name}: )\S+", rf"\g<1>{quoted}", text)
        return "kvconform.gitlab-ci.yml", text
    text = _rendered("github.yml", url=origin.url, commit=origin.commit, github=origin.on_github)
    return ".github/workflows/kvconform.yml", text


def write(repository: Path, files: dict[str, str]) -> Iterator[Written]:
    """Write what is missing. EnvironmentProblem where that cannot be."""
    for name, text in files.items():
        path = repository / name
        kept = path.exists()
        if not kept:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            except OSError as error:
                raise EnvironmentProblem(
                    f"{error.filename} cannot be written: {error.strerror}"
                ) from None
        yield Written(Path(name), kept)


def test_file() -> str:
    """tests/test_conformance.py."""
    return _rendered("test_conformance.py")


def _option(name: str, default: object) -> tuple[str, object, bool]:
    """(name, value, whether it is in force): places are, what else there is can be looked up and switched on."""
    if PLACES.search(name) and (default is None or isinstance(default, str)):
        return name, "{tmp}/" + re.sub(r"\W+", "-", name), True
    return name, default, False


def _rendered(name: str, **values: Any) -> str:
    assets = importlib.resources.files("kvconform.init") / "assets"
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True
    )
    environment.filters["toml"] = _toml
    environment.filters["quoted"] = json.dumps  # YAML takes JSON's strings
    environment.filters["key"] = lambda name: (
        name if re.fullmatch(r"[\w-]+", name, re.ASCII) else _toml(name)
    )
    return environment.from_string((assets / f"{name}.jinja").read_text(encoding="utf-8")).render(
        **values
    )


def _toml(value: object) -> str:
    """A value as TOML; an empty string for what it has no word for."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # inf, nan
    if isinstance(value, bool | int | float) or (isinstance(value, str) and _writable(value)):
        return json.dumps(value, ensure_ascii=False).replace(
            "\x7f", "\\u007f"
        )  # no pairs of surrogates, which TOML has not
    return '""'


def _writable(text: str) -> bool:
    """Whether it is text at all: not with half of a surrogate pair, as in a file name that is no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
