# SPDX-License-Identifier: Apache-2.0
"""Results of mutants, in a file of JSON lines that later runs continue."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter

from kvconform.dev.mutants.mutation import Site

Outcome = Literal["killed", "survived", "undecided"]
Means = Literal["", "requirement", "raise", "hang", "death", "start"]
"""What a kill shows itself by.

A requirement other than `hook.no-raise`; an exception; a hook or case that does not end; the death
of the process; a connector that cannot be imported or constructed, which `kvconform run` refuses.
"""


@dataclass
class Result:
    """What became of one mutant.

    - `digest`: of the module's original source; `suite`: of the suite (`suite_digest`).
    - `means`, `requirements`, `run`: what killed it. `explored`: it took a random workload.
    - `runs`: made before the decision; `reached`: runs of the original that execute the line.
      `left`: runs of the cases that a limit of time left out, so that a survivor met only a part.
    - `date`: of the judging, as 2026-11-29.
    - `note`: why it is undecided, or what died.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    subject: str
    module: str
    function: str
    operator: str
    line: str
    occurrence: int
    digest: str
    suite: str
    outcome: Outcome
    means: Means = ""
    requirements: list[str] = field(default_factory=list)
    run: str = ""
    explored: bool = False
    runs: int = 0
    reached: int = 0
    left: int = 0
    seconds: float = 0.0
    date: str = ""
    note: str = ""
    diff: list[str] = field(default_factory=list)

    @property
    def site(self) -> Site:
        """The mutation's identity."""
        return Site(self.module, self.function, self.operator, self.line, self.occurrence)

    @property
    def killed_by_a_case(self) -> bool:
        """Whether a run of a case killed it: not its start, and no random workload."""
        return self.outcome == "killed" and bool(case_of(self.run))

    def to_json(self) -> str:
        """Return the result as a line of JSON, without defaults."""
        kept = {name: value for name, value in asdict(self).items() if value not in ("", [], False)}
        return json.dumps(kept, ensure_ascii=False)


_RESULT: TypeAdapter[Result] = TypeAdapter(Result)


def case_of(run: str) -> str:
    """Return the case of a run `SETUP/CASE[...]`; "" for the start and for random workloads."""
    return run.partition("/")[2].partition("[")[0]


def read(path: Path) -> list[Result]:
    """Return the results in a file, the latest of each mutant; none if there is no file."""
    if not path.exists():
        return []
    found: dict[tuple[str, Site], Result] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        # The last line may be cut off: the process was ended while it wrote.
        if not line.endswith("}"):
            continue
        result = _RESULT.validate_python({"function": "", "occurrence": 0, **json.loads(line)})
        found[result.subject, result.site] = result
    return list(found.values())


def append(path: Path, result: Result) -> None:
    """Add a result to a file, which is created if it does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cut_off = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * cut_off + result.to_json() + "\n")


def rewrite(path: Path, results: Iterable[Result]) -> None:
    """Replace a file by these results, sorted by site."""
    lines = [each.to_json() for each in sorted(results, key=lambda each: (each.subject, each.site))]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def of(site: Site, **fields: Any) -> Result:
    """Return the result of a mutation."""
    return Result(
        module=site.module,
        function=site.function,
        operator=site.operator,
        line=site.line,
        occurrence=site.occurrence,
        **fields,
    )
