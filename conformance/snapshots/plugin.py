# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin of `kvconform snapshot`. Any other pytest run can load it, too.

    pytest -p kvconform.snapshots.plugin --pyargs kvconform.snapshots --kv-snapshots DIR

That takes the connector from the settings file, and `--snapshot-update` if given. A missing
snapshot fails; unused ones are reported and never deleted.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvconform.errors import KvconformError

if TYPE_CHECKING:
    from kvconform.snapshots.job import Job

JOB = pytest.StashKey["Job"]()
HANDED = "kvconform-snapshot-job"


class Handed:
    """Plugin that carries a job to the snapshot plugin, which looks it up by name."""

    __name__ = HANDED

    def __init__(self, job: Job) -> None:
        self.job = job


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --kv-snapshots."""
    parser.getgroup("kvconform").addoption(
        "--kv-snapshots", metavar="DIR", help="compare a KV connector with the snapshots in DIR"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Create the job.

    UsageError for bad settings, and for an update by several processes, which share one index.
    """
    options = config.option
    updating = bool(options.update_snapshots)
    distributed = (
        getattr(options, "numprocesses", None)
        or getattr(options, "tx", None)
        or hasattr(config, "workerinput")
    )
    if updating and distributed:
        raise pytest.UsageError("snapshots are updated by one process: leave out -n")
    # the store finds unused snapshots itself, and relates snapshots to cases
    options.disable_unused_snapshots = options.no_cleanup = True
    config.addinivalue_line("filterwarnings", r"ignore:\s*Can not relate snapshot")
    handed = config.pluginmanager.get_plugin(HANDED)
    if handed is not None:
        config.stash[JOB] = handed.job
        return
    if options.kv_snapshots is None:
        raise pytest.UsageError("name the directory of the snapshots: --kv-snapshots DIR")
    # These import vLLM, which takes seconds. The errors above need not wait for that.
    from kvconform.config.settings import load
    from kvconform.snapshots.job import Job

    try:
        config.stash[JOB] = Job(load({}), Path(options.kv_snapshots).absolute(), updating=updating)
    except KvconformError as error:
        raise pytest.UsageError(error.message) from None


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close the job."""
    if JOB in config.stash:
        config.stash[JOB].close()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Report unused snapshots."""
    unused = sorted(config.stash[JOB].unused()) if JOB in config.stash else []
    if unused:
        terminalreporter.write_line(f"{len(unused)} snapshots are unused: {', '.join(unused[:8])}")
