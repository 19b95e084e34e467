# SPDX-License-Identifier: Apache-2.0
"""Data of the specification: requirements, cases, scenarios, profiles, planted defects, schemas."""
