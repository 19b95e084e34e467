# SPDX-License-Identifier: Apache-2.0
"""`python -m kvconform` is `kvconform`."""

from __future__ import annotations

from kvconform.cli import main

if __name__ == "__main__":
    main()
