# SPDX-License-Identifier: Apache-2.0
"""Damage to what a connector has stored, in the run's directory or on servers.

It is done when the connector has been granted a load, so it has answered the lookup from a store
that was whole.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from kvconform.contract.steps import NOTHING_TO_DAMAGE, NOTHING_TO_FILL, Damage
from kvconform.contract.trace import Trace
from kvconform.files import sizes_below
from kvconform.observe.call import Call
from kvconform.observe.probe import Probe
from kvconform.process.damaged import damage_files
from kvconform.process.full import full
from kvconform.process.servers import Servers


@dataclass
class Damager:
    """Damage that is armed, and strikes once.

    `folder` is the run's directory. `lacks` is a sentence if there was nothing to damage.
    `until_end` ends what lasts.
    """

    folder: Path
    trace: Trace
    armed: Damage | None = None
    lacks: str | None = None
    until_end: ExitStack = field(default_factory=ExitStack)

    def arm(self, damage: Damage, probe: Probe) -> None:
        """Damage the store after the next grant of a load that `probe` sees."""
        self.armed = damage
        probe.on("update_state_after_alloc", after=self._granted)

    def _granted(self, call: Call) -> None:
        if self.armed is None or not call.arg(2, "num_external_tokens", 0):
            return
        damage, self.armed = self.armed, None
        if damage.disk is not None:
            count = self._fill()
            lacks = NOTHING_TO_FILL
        elif damage.files is not None:
            count = damage_files(self.folder, damage.files, damage.every)
            count += sum(servers.damage(damage.files) for servers in Servers.active)
            lacks = NOTHING_TO_DAMAGE
        else:
            count = stop_servers()
            lacks = "the connector's settings declare no [[servers]]"
        if count:
            self.trace.damaged = True
            self.trace.emit("store.damaged", what=damage.what, count=count)
        else:
            self.lacks = lacks

    def _fill(self) -> int:
        """Let the disk be full; return the number of files, or 0 if nothing would be cut short."""
        files = sizes_below(self.folder)
        limit = max(files, default=0) // 2
        if not limit:
            return 0
        self.until_end.enter_context(full(limit))
        return len(files)


def stop_servers() -> int:
    """Kill every server of this process; return their number. The next run starts them again."""
    names = [(servers, name) for servers in Servers.active for name in servers.all]
    for servers, name in names:
        servers.kill(name)
    return len(names)
