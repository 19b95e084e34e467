# SPDX-License-Identifier: Apache-2.0
"""Correct connectors that do things differently from the reference connector. None of them may fail anything."""
