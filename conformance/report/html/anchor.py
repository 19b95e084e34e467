# SPDX-License-Identifier: Apache-2.0
"""Links to the failures in report.html.

A link is made of the requirement's id and the number of the root cause, as the terminal prints
them: `report.html#save.owned-1`. A consequence has the number of its root cause; a second cause of
the same requirement below it ends with `.2`. The same rows always give the same links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvconform.judge.records import Row
from kvconform.report.roots import Root, roots

NAME = "report.html"


class Anchor(NamedTuple):
    """The id of a failure's section in the page, its title there, and the rows of the failure."""

    id: str
    title: str
    group: Sequence[Row]


def anchors(root: Root, number: int) -> list[Anchor]:
    """Return the anchors of a root cause and of its consequences; `number` counts from 1."""
    name = root.row.requirement
    found = [Anchor(f"{name}-{number}", f"{number}. {name}", root.group)]
    seen: Counter[str] = Counter()
    for group in root.consequences:
        name = group[0].requirement
        seen[name] += 1
        again = seen[name] > 1
        id_ = f"{name}-{number}" + (f".{seen[name]}" if again else "")
        found.append(Anchor(id_, name + (f" ({seen[name]})" if again else ""), group))
    return found


def links(rows: Iterable[Row]) -> dict[tuple[str, str], str]:
    """Return `report.html#...` of each failure, by requirement and run; `rows` are all rows."""
    return {
        (row.requirement, row.run): f"{NAME}#{anchor.id}"
        for number, root in enumerate(roots(list(rows)), 1)
        for anchor in anchors(root, number)
        for row in anchor.group
    }
