# SPDX-License-Identifier: Apache-2.0
"""Workloads made by machine: drawn at random, or all of a kind; run, judged by the same requirements, and shrunk to a case to read."""
