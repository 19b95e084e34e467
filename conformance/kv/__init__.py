# SPDX-License-Identifier: Apache-2.0
"""The KV memory that the harness owns: cache and shadow, content codes, grants, the oracle, and the device."""
