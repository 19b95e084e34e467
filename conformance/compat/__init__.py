# SPDX-License-Identifier: Apache-2.0
"""Everything that depends on the installed vLLM. No other package branches on its version."""
