# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin (entry point `pytest11`).

Every pytest run loads it where kvconform is installed. Therefore it imports nothing heavy, and does
nothing without `--connector`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

WORKER = "kvconform-worker"
CONTROLLER = "kvconform-controller"
PRESET = "kvconform-preset"
"""Name of the plugin by which `kvconform run` provides its controller."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `kvconform run`, with the prefix `kvconform-` to avoid collisions.

    `--connector` activates the plugin.
    """
    group = parser.getgroup(
        "kvconform", "conformance of vLLM KV connectors (pytest --pyargs kvconform --connector ...)"
    )
    group.addoption(
        "--connector",
        metavar="PKG.MOD:CLASS",
        help="judge this KV connector (or a name registered in vLLM's factory)",
    )
    group.addoption(
        "--extra-config",
        metavar="JSON|@FILE",
        help="its kv_connector_extra_config; {tmp} is a separate directory for each case",
    )
    group.addoption(
        "--kvconform-config",
        metavar="FILE",
        help="settings file instead of kvconform.toml or pyproject.toml",
    )
    group.addoption(
        "--kvconform-engine",
        choices=("reference", "vllm", "live", "all"),
        help="engines to run on (default: all)",
    )
    group.addoption(
        "--kvconform-scheduling",
        choices=("sync", "async", "all"),
        help="scheduling to run with (default: all)",
    )
    group.addoption(
        "--kvconform-select", action="append", metavar="ID", help="only these cases or requirements"
    )
    group.addoption(
        "--kvconform-shard",
        metavar="I/N",
        help="only this part of the runs; kvconform merge merges the reports",
    )
    group.addoption(
        "--kvconform-profile", metavar="NAME", help="profile to judge by (default: core)"
    )
    group.addoption(
        "--kvconform-report-dir",
        metavar="DIR",
        help="directory of the reports (default: kvconform-report)",
    )
    group.addoption("--kvconform-seed", type=int, metavar="N", help="seed of prompts and tokens")
    group.addoption(
        "--kvconform-strict", action="store_true", default=None, help="SHOULD and MAY count too"
    )
    group.addoption(
        "--kvconform-hook-timeout",
        type=float,
        metavar="SECONDS",
        help="time limit per hook (default: 10)",
    )


def _active(config: pytest.Config) -> bool:
    return bool(config.getoption("connector", None))


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Iterator[None]:
    """Run cases in worker processes, also without -n, and replace every worker that dies."""
    option = config.option
    xdist = config.pluginmanager.hasplugin("xdist") and not hasattr(config, "workerinput")
    in_process = config.getoption("usepdb", False) or config.getoption("collectonly", False)
    if _active(config) and xdist and not in_process:
        if not option.numprocesses and not option.tx:
            option.numprocesses = 1
        if option.maxworkerrestart is None:
            option.maxworkerrestart = "1000"
    return (yield)


def pytest_configure(config: pytest.Config) -> None:
    """Register the controller or a worker, or both if there are no worker processes."""
    if not _active(config):
        return
    received = getattr(config, "workerinput", {}).get("kvconform")
    if received is None:
        if hasattr(config, "workerinput"):
            return
        controller = _controller(config)
        config.pluginmanager.register(controller, CONTROLLER)
        received = controller.for_worker()
        if config.getoption("dist", "no") != "no":
            return
    from kvconform.config.settings import Settings
    from kvconform.session.worker import MAIN, Worker

    data = json.loads(received)
    name = getattr(config, "workerinput", {}).get("workerid", MAIN)
    logs = Path(data["logs"]) if data["logs"] else None
    worker = Worker(
        Settings.model_validate(data["settings"]),
        data["vllm"],
        Path(data["scratch"]),
        name,
        logs,
        first=data["first"],
        traced=data["traced"],
        untraced=data["untraced"],
    )
    config.pluginmanager.register(worker, WORKER)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect nothing of the kvconform package but this folder.

    Snapshots have a plugin of their own, and the links in the package lead to folders without
    tests.
    """
    here = Path(__file__).parent
    elsewhere = collection_path.parent == here.parent and collection_path != here
    return True if _active(config) and elsewhere else None


def _controller(config: pytest.Config) -> Any:
    """Return the controller of `kvconform run`, or a new one with the settings of pytest's options.

    Raises pytest.UsageError for bad settings.
    """
    preset = config.pluginmanager.get_plugin(PRESET)
    if preset is not None:
        return preset.controller
    from kvconform.config.settings import as_arguments, load, parse_extra_config
    from kvconform.errors import KvconformError
    from kvconform.report.terminal import make_console
    from kvconform.session.controller import Controller

    names = (
        "engine",
        "scheduling",
        "select",
        "shard",
        "profile",
        "report_dir",
        "seed",
        "strict",
        "hook_timeout",
    )
    given = {name: config.getoption(f"kvconform_{name}") for name in names}
    given["verbose"] = config.get_verbosity() > 0 or None
    try:
        extra = config.getoption("extra_config")
        given |= {
            "connector": config.getoption("connector"),
            "extra_config": parse_extra_config(extra) if extra else None,
        }
        again = {
            "--extra-config": extra,
            "--profile": given["profile"],
            "--strict": given["strict"],
            "--hook-timeout": given["hook_timeout"],
            "--config": config.getoption("kvconform_config"),
        }
        given["arguments"] = as_arguments(again)
        if isinstance(config.option.numprocesses, int) and config.option.numprocesses:
            given["workers"] = config.option.numprocesses
        return Controller(
            load(given, file=config.getoption("kvconform_config")), make_console(sys.stdout)
        )
    except KvconformError as error:
        # Here, these options have a prefix.
        options = "|".join(names).replace("_", "-")
        message = re.sub(rf"--(?=({options})\b)", "--kvconform-", error.message)
        raise pytest.UsageError(message) from None
