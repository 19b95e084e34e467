# SPDX-License-Identifier: Apache-2.0
"""Reference scheduler and connector, correct variants of the connector, and planted defects."""
