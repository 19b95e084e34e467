# SPDX-License-Identifier: Apache-2.0
"""Recorded results of real connectors, findings about them, and the pages made from both: `python -m kvconform.dev.results`."""
