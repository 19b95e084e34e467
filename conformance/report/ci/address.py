# SPDX-License-Identifier: Apache-2.0
"""Addresses of the report, where a CI system keeps it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def run_page(environment: Mapping[str, str]) -> str:
    """Return the page of the present run in GitHub Actions, which has its artefacts; else empty.

    GitHub keeps artefacts as archives, so that no address leads into one.
    """
    names = ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_RUN_ID")
    server, repository, run = (environment.get(name, "") for name in names)
    return f"{server}/{repository}/actions/runs/{run}" if server and repository and run else ""


def artefact(environment: Mapping[str, str], folder: Path) -> str:
    """Return the address of a folder among the artefacts of the present GitLab job; else empty.

    Empty, too, if the folder is not below the project's, because then it is no artefact.
    """
    job = environment.get("CI_JOB_URL", "")
    project = environment.get("CI_PROJECT_DIR", "")
    path = Path(os.path.relpath(folder.resolve(), Path(project or ".").resolve()))
    if not job or not project or ".." in path.parts:
        return ""
    return "/".join([job, "artifacts/file", *path.parts])
