# SPDX-License-Identifier: Apache-2.0
"""From a trace to a verdict: monitors, verdicts, blame, aggregation, and failures in words.

Nothing in this package depends on an engine.
"""
