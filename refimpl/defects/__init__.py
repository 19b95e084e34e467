# SPDX-License-Identifier: Apache-2.0
"""Planted defects: known-bad connectors, and faults of an engine (`spec/defects.yaml`)."""
