# SPDX-License-Identifier: Apache-2.0
"""A whole run inside pytest: the controller, the workers, and their deaths."""
