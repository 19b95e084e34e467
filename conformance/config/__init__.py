# SPDX-License-Identifier: Apache-2.0
"""What a run is asked to do: settings, the connector under test, the catalogue, the selection of cases."""
