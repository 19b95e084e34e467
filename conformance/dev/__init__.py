# SPDX-License-Identifier: Apache-2.0
"""Tools for developing kvconform itself: lint, drift, docs, planted defects, sweep, history, benchmarks, results.

Only the command line imports it.
"""
