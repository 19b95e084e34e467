# SPDX-License-Identifier: Apache-2.0
"""GitHub Actions' workflow commands."""

from __future__ import annotations

from kvconform.ci.annotation import Annotation

LONGEST = 3000


def command(one: Annotation) -> str:
    """`::error file=...,line=...,title=...::message`, escaped as the runner wants it."""
    more = f" (and in {one.others} more run{'s' if one.others > 1 else ''})" if one.others else ""
    place = f"file={_property(one.path)},line={one.line}," if one.path else ""
    return f"::error {place}title={_property('kvconform: ' + one.requirement)}::{_data(f'{one.message}{more}: {one.run}'[:LONGEST])}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str | None) -> str:
    return _data(text or "").replace(":", "%3A").replace(",", "%2C")
