# SPDX-License-Identifier: Apache-2.0
"""What a kind of event is: its channel, its fields and their types."""

from __future__ import annotations

from dataclasses import dataclass

COMMON_FIELDS = ("k", "seq", "step")
ENGINE_FIELD = "on"
"""Which of two engines an event is about; events of one-engine runs do not have it."""

_TYPES: dict[str, tuple[type, ...]] = {
    "s": (str,),
    "i": (int,),
    "b": (bool,),
    "f": (int, float),
    "l": (list, tuple),
    "d": (dict,),
    "a": (object,),
}


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of event: its channel, its fields (name -> type code, see events.py) and one line about it."""

    name: str
    channel: str
    doc: str
    fields: dict[str, str]

    def accepts(self, field: str) -> bool:
        """Whether a check on this kind may read `field`."""
        return field in self.fields or field in COMMON_FIELDS

    def problems(self, event: dict[str, object]) -> list[str]:
        """Sentences about what is wrong with the shape of an event of this kind; empty if nothing is."""
        found = [f"{self.name}: field {f} missing" for f in (*COMMON_FIELDS, *self.fields) if f not in event]
        for field, value in event.items():
            if field in COMMON_FIELDS or field == ENGINE_FIELD:
                continue
            code = self.fields.get(field)
            if code is None:
                found.append(f"{self.name}: unknown field {field}")
            elif value is None:
                if not code.endswith("?") and code[0] != "a":
                    found.append(f"{self.name}: {field} is None")
            elif not isinstance(value, _TYPES[code[0]]) or (isinstance(value, bool) and code[0] in "if"):
                found.append(f"{self.name}: {field} is {value!r}, not {_TYPES[code[0]][0].__name__}")
        return found
