# SPDX-License-Identifier: Apache-2.0
"""report.html: one page with a timeline for each failure."""
