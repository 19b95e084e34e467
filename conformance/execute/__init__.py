# SPDX-License-Identifier: Apache-2.0
"""Runs independent pieces of work in this process, in local processes, or on a Ray cluster."""
