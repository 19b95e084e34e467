# SPDX-License-Identifier: Apache-2.0
"""One engine driven by hand: scheduler, ranks, workers, and both halves of the connector."""

import kvconform.compat.environment  # noqa: F401
