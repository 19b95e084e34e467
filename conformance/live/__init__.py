# SPDX-License-Identifier: Apache-2.0
"""Engine `live`: the complete vLLM with a tiny model, observed from within its processes."""
