# SPDX-License-Identifier: Apache-2.0
"""Entry point of `python -m kvconform`, which is the command `kvconform`."""

from __future__ import annotations

from kvconform.cli import main

if __name__ == "__main__":
    main()
