# SPDX-License-Identifier: Apache-2.0
"""Engine `live`: all of vLLM with a tiny model, watched from within its processes."""
