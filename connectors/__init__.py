# SPDX-License-Identifier: Apache-2.0
"""Configurations of real connectors, by name: data only (kvconform.config.catalogue)."""
