# SPDX-License-Identifier: Apache-2.0
"""Turns calls of the connector interface and the scheduler's decisions into trace events."""
