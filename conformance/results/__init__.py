# SPDX-License-Identifier: Apache-2.0
"""Results: what was found out about real connectors, as digests of reports and as findings, and the pages made from both."""
