# SPDX-License-Identifier: Apache-2.0
"""Random workloads and abort races, shrunk to a minimal case when they fail."""
