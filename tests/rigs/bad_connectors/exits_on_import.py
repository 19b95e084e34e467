# SPDX-License-Identifier: Apache-2.0
"""A module that calls sys.exit when it is imported, as a script without a guard does."""

import sys


class C:
    """Defined, and of no use."""


sys.exit(0)
