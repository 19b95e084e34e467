# SPDX-License-Identifier: Apache-2.0
"""The process that runs workloads: it has the connector, its servers and a watchdog, and takes one workload after the other."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvconform import watchdog
from kvconform.errors import KvconformError
from kvconform.explore.workload import Workload
from kvconform.load import Spec, load_spec
from kvconform.settings import Settings
from kvconform.target import Target
from kvconform.workplace import settle_in

if TYPE_CHECKING:
    from kvconform.explore.outcome import Outcome

START_LIMIT = 300.0
"""Seconds for imports, servers and the connector's first start."""


def serve(connection: Connection, settings: Settings, scratch: Path, name: str) -> None:
    """Answer (data, seed, requirements or None) with an outcome's dict, until None comes or the other end is gone."""
    servers, settings = settle_in(settings, scratch, name, scratch)
    watchdog.start(settings.hook_timeout, scratch / f"{name}.note")
    try:
        servers.up()
        _serve(connection, settings, scratch / name)
    except KvconformError as error:
        connection.send({"abort": (error.code, error.message)})
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass
    finally:
        watchdog.stop()
        servers.down()


def _serve(connection: Connection, settings: Settings, tmp: Path) -> None:
    with watchdog.case("start", START_LIMIT):
        from kvconform import smoke
        from kvconform.probe import Patch

        target = smoke.target_of(settings)
        smoke.check(target, tmp, START_LIMIT, engine=settings.engine)
    spec = load_spec()
    connection.send({"ready": True})
    with Patch.parking():
        number = 0
        while (job := connection.recv()) is not None:
            number += 1
            connection.send(_outcome(job, target, spec, tmp / str(number), watchdog.case_limit(settings.hook_timeout)).to_dict())


def _outcome(job: tuple[dict[str, Any], int, list[str] | None], target: Target, spec: Spec, tmp: Path, limit: float) -> Outcome:
    from kvconform.explore.outcome import Outcome, outcome

    data, seed, requirements = job
    try:
        with watchdog.case(data["id"], limit):
            return outcome(Workload(data, seed), target, spec, tmp, requirements=requirements)
    except (Exception, SystemExit, watchdog.HookTimeout) as error:  # a workload that is no case, or the harness's fault
        return Outcome(error=f"{type(error).__name__}: {error}".splitlines()[0])
