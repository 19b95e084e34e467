# SPDX-License-Identifier: Apache-2.0
"""Configuration of a run: settings, connector under test, catalogue, selection of cases."""
