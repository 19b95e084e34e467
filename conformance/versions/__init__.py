# SPDX-License-Identifier: Apache-2.0
"""One connector judged in many vLLM releases, and what changed between them."""
