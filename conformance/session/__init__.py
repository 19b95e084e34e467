# SPDX-License-Identifier: Apache-2.0
"""A whole run inside pytest: the controller, its workers, and worker deaths."""
