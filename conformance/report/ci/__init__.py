# SPDX-License-Identifier: Apache-2.0
"""Reports for continuous integration: annotations, job summaries, exit codes by policy."""
