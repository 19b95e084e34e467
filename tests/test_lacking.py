# SPDX-License-Identifier: Apache-2.0
"""What an entry of the catalogue needs, and is not installed, is told before anything runs."""

from __future__ import annotations

import pytest

from kvconform.environment import lacking, versions


def test_what_is_not_installed_is_told() -> None:
    assert versions(["--no-deps", "pytest>=1", "no-such-package==2"]) == {"pytest": pytest.__version__, "no-such-package": None}
    (sentence,) = lacking("catalogue:thing", ["--no-deps", "pytest", "no-such-package==2"])
    assert sentence.startswith("no-such-package is not installed here; nox -s conformance -- --connector catalogue:thing installs")
    assert lacking("catalogue:thing", ["pytest"]) == []
