# SPDX-License-Identifier: Apache-2.0
"""Reports about a run: JSON, terminal, HTML page, comparison, CI.

The package reads verdicts and traces; it runs nothing.
"""
