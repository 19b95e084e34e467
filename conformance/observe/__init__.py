# SPDX-License-Identifier: Apache-2.0
"""Turns what crosses the connector interface, and what the scheduler does, into events. Changes nothing else."""
