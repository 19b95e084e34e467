# SPDX-License-Identifier: Apache-2.0
"""Processes and how they end: time limits, notes of a death, servers, supervisors, ports."""
