# SPDX-License-Identifier: Apache-2.0
"""A correct connector that logs an exception of each lookup; its frames hold the request."""

from __future__ import annotations

import logging
from typing import Any

from kvconform.refimpl.connector import ReferenceConnector

logger = logging.getLogger("vllm.logs_errors")


class Connector(ReferenceConnector):
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        try:
            raise TimeoutError(f"no answer for {request.request_id}")
        except TimeoutError as error:
            logger.error("The lookup timed out: %s", error)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)
