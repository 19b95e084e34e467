# SPDX-License-Identifier: Apache-2.0
"""`kvconform init`: settings, a workflow and a test for a connector's repository."""
