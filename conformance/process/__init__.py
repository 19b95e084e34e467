# SPDX-License-Identifier: Apache-2.0
"""Processes: time limits for hooks, servers that connectors need, and clean-up after both."""
