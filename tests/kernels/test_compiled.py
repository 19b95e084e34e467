# SPDX-License-Identifier: Apache-2.0
"""Tests of the kernels compiled for Hopper, which needs no GPU.

They access memory 16 bytes at a time. An interpreter shows neither.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from kvconform.kernels.device import AVAILABLE
from places import RIGS


@pytest.fixture(scope="module", params=["installed", "oldest"])
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Compile with the installed Triton, and with the oldest allowed, which nox installs."""
    if not AVAILABLE:
        pytest.skip("Triton is not installed")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    if request.param == "oldest":
        oldest = os.environ.get("KVCONFORM_OLDEST_TRITON")
        if oldest is None:
            pytest.skip("`nox -s kernels` installs the oldest Triton")
        assert os.path.isdir(os.path.join(oldest, "triton"))
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [oldest, env.get("PYTHONPATH")]))
    ran = subprocess.run(
        [sys.executable, str(RIGS / "compiling.py")],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(ran.stdout.splitlines()[-1])


def test_every_kernel_compiles_and_keeps_all_in_registers(compiled: list[dict[str, Any]]) -> None:
    assert {row["kernel"] for row in compiled} == {
        "write_kernel",
        "verify_kernel",
        "transfer_kernel",
        "digest_kernel",
    }
    assert len(compiled) == 6 * 9
    # A digest of rows that are long and not aligned keeps 8 bytes in memory with Triton 3.9.
    odd = ("digest_kernel", "mla torch.bfloat16 1x577")
    kept = [row for row in compiled if (row["kernel"], row["about"]) != odd]
    assert len(kept) == 6 * 9 - 1 and [row for row in kept if row["spilled"]] == []


def test_rows_are_read_and_written_16_bytes_at_a_time(compiled: list[dict[str, Any]]) -> None:
    # rows of caches with three heads, and of 577 elements, are not aligned
    wide = [row for row in compiled if not re.search(" 3x|577", row["about"])]
    assert [
        row
        for row in wide
        if row["kernel"] in ("write_kernel", "transfer_kernel")
        and row["stores"] != ["st.global.v4.b32"]
    ] == []
    assert [
        row
        for row in wide
        if row["kernel"] in ("verify_kernel", "transfer_kernel")
        and "ld.global.v4.b32" not in row["loads"]
    ] == []


def test_neighbouring_threads_access_neighbouring_words_of_a_row(
    compiled: list[dict[str, Any]],
) -> None:
    # If each has a row of its own, an access touches 32 rows, and takes four times as long.
    assert [row for row in compiled if row["orders"] != ["[1, 0]"]] == []
