# SPDX-License-Identifier: Apache-2.0
"""A connector whose constructor requires an option that is not given."""

from __future__ import annotations

from typing import Any

from kvconform.refimpl.connector import ReferenceConnector


class Connector(ReferenceConnector):
    """Raises KeyError when it is constructed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server = {}["server"]
