# SPDX-License-Identifier: Apache-2.0
"""Writes kvconform's files into a connector's repository; existing files stay as they are."""

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
from kvconform.errors import UsageError
from kvconform.files import check_writable, obstacle
from kvconform.init.find import Found, hands_over, options
from kvconform.init.origin import Origin

PLACES = re.compile(r"(?i)(^|[_.-])(path|dir|directory|folder|root|storage|file|location)s?$")
"""Options that name the place of stored KV, where a run must not find an earlier run's data."""

FIXTURES = Path(fixtures.__path__[0])


@dataclass(frozen=True)
class Written:
    """A file, by its path in the repository; `kept`: it existed before."""

    path: Path
    kept: bool


def template(folder: Path) -> None:
    """Copy the template connector into a new folder. UsageError if the folder is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists: --template makes a new folder")
    check_writable("--template", folder)
    shutil.copytree(
        FIXTURES / "template",
        folder,
        ignore=shutil.ignore_patterns("__pycache__"),
        dirs_exist_ok=True,
    )


def settings(repository: Path, connector: str, found: Found | None) -> str:
    """Return the text of kvconform.toml; without `found` it lists no options.

    `found` is None if the connector was named and is not in the repository.
    """
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
        hands_over=found is not None and hands_over(found),
    )


def workflow(repository: Path, origin: Origin) -> tuple[str, str]:
    """Return (path, text) of the CI workflow: GitLab's if the repository has one, else GitHub's."""
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
    """Write the missing files, yielding each. UsageError, before any, if one cannot be written."""
    for name in files:
        path = repository / name
        if not path.exists() and (why := obstacle(path.parent)):
            raise UsageError(f"{path}: {why}")
    for name, text in files.items():
        path = repository / name
        kept = path.exists()
        if not kept:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        yield Written(Path(name), kept)


def test_file() -> str:
    """Return the text of tests/test_conformance.py."""
    return _rendered("test_conformance.py")


def _option(name: str, default: object) -> tuple[str, object, bool]:
    """Return (name, value, whether it is set); only places are set, other options are comments."""
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
    """Return a value as TOML; an empty string if TOML cannot express it."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # inf, nan
    if isinstance(value, bool | int | float) or (isinstance(value, str) and _writable(value)):
        # ensure_ascii would write pairs of surrogates, which TOML does not allow.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return '""'


def _writable(text: str) -> bool:
    """Return whether the text has no lone surrogate, as from a file name that is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
