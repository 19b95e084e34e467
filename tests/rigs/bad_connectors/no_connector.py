# SPDX-License-Identifier: Apache-2.0
"""A class that is not a connector."""


class Plain:
    """Has nothing to do with vLLM."""
