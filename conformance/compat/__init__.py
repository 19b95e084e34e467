# SPDX-License-Identifier: Apache-2.0
"""Everything that depends on the installed vLLM; no other package branches on its version."""
