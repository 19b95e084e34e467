# SPDX-License-Identifier: Apache-2.0
"""One case, run and judged: driver, expectations, pairs of engines, isolation, calibration."""
