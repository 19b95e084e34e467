# SPDX-License-Identifier: Apache-2.0
"""From a trace to a verdict: guards, monitors, verdicts, blame, aggregation, and events in words. Knows no engine."""
