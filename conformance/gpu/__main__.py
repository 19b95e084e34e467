# SPDX-License-Identifier: Apache-2.0
"""Entry point of `python -m kvconform.gpu`, which is the command `kvconform gpu`."""

from __future__ import annotations

import sys

from kvconform.cli import main

if __name__ == "__main__":
    main(["gpu", *sys.argv[1:]])
