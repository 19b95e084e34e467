# SPDX-License-Identifier: Apache-2.0
"""`kvconform watch`, and the warm server: runs in processes forked from one that has vLLM."""
