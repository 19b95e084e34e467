# SPDX-License-Identifier: Apache-2.0
"""The KV memory that the harness owns: cache and shadow, content ids, grants, oracle, device."""
