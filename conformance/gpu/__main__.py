# SPDX-License-Identifier: Apache-2.0
"""Entry point of `python -m kvconform.gpu`, which is the command `kvconform gpu`.

The command line imports this package, so its program is run by its name.
"""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "gpu")
    runpy.run_module("kvconform", run_name="__main__")
