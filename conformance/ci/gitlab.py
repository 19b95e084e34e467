# SPDX-License-Identifier: Apache-2.0
"""GitLab's Code Quality report."""

from __future__ import annotations

import json
from collections.abc import Iterable

from kvconform.ci.annotation import Annotation

NAME = "gl-code-quality-report.json"


def code_quality(found: Iterable[Annotation]) -> str:
    """The file's text. A failure without a place in the connector's source is shown at kvconform.toml: GitLab wants a path."""
    return json.dumps(
        [
            {
                "description": f"{one.requirement}: {one.message} ({one.run})", "check_name": f"kvconform/{one.requirement}",
                "fingerprint": one.fingerprint, "severity": "critical",
                "location": {"path": one.path or "kvconform.toml", "lines": {"begin": max(1, one.line)}},
            }
            for one in found
        ],
        indent=1, ensure_ascii=False,
    ) + "\n"  # fmt: skip
