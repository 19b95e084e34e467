# SPDX-License-Identifier: Apache-2.0
"""Tests that open descriptors are counted by kind. Sockets that listen are a kind of their own."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvconform.process import descriptors

pytestmark = pytest.mark.skipif(
    not descriptors.can_list(), reason="the system does not list descriptors"
)


def test_each_kind_is_counted(tmp_path: Path) -> None:
    before = descriptors.by_kind()
    ends = os.pipe()
    null = os.open("/dev/null", os.O_RDONLY)
    with (
        socket.create_server(("127.0.0.1", 0)),
        socket.socket(),
        open(tmp_path / "file", "w", encoding="utf-8"),
    ):
        found = descriptors.by_kind() - before
    for descriptor in (*ends, null):
        os.close(descriptor)
    assert found == {
        "listening sockets": 1,
        "other sockets": 1,
        "files": 1,
        "pipes": 2,
        "other descriptors": 1,
    }
    assert descriptors.by_kind() == before
