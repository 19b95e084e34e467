# SPDX-License-Identifier: Apache-2.0
"""Recorded results of real connectors, findings about them, and the pages generated from both."""
