# SPDX-License-Identifier: Apache-2.0
"""Tests of the specification: it passes lint, and its checks accept and reject the examples.

Nothing here imports vLLM.
"""

from __future__ import annotations

import subprocess
import sys

from kvconform.contract.loader import load_spec
from kvconform.dev.lint import lint_root
from kvconform.dev.lint_requirements import outcomes


def test_the_specification_is_clean() -> None:
    found = lint_root()
    assert [str(finding) for finding in found] == []


def test_every_example_of_the_specification() -> None:
    """Lint checks the examples themselves; here every requirement must have both kinds."""
    spec = load_spec()
    for req in spec.requirements.values():
        found = list(outcomes(req))
        assert all(outcome.as_wanted for outcome in found), req.id
        assert {"bad"} <= {outcome.which for outcome in found}, req.id


def test_vllm_is_never_imported() -> None:
    code = (
        "import sys, kvconform.dev.lint as l, kvconform.report.explain, kvconform.dev.schema; "
        "l.lint_root(); sys.exit('vllm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
