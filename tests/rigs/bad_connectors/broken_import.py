# SPDX-License-Identifier: Apache-2.0
"""A connector's module whose own dependency is missing."""

import a_package_that_nobody_has  # noqa: F401  # type: ignore[import-not-found]
