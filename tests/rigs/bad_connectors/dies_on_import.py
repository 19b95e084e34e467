# SPDX-License-Identifier: Apache-2.0
"""A module that ends the process while it is imported."""

import os


class C:
    """Defined, and of no use."""


os._exit(9)
