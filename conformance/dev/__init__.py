# SPDX-License-Identifier: Apache-2.0
"""Tools for the development of kvconform itself; only the command line imports them.

Lint, drift, documentation, planted defects, sweep, history, benchmarks, results.
"""
