# SPDX-License-Identifier: Apache-2.0
"""Everything that is written about a run: JSON, terminal, page, comparison, CI. Reads verdicts and traces; runs nothing."""
