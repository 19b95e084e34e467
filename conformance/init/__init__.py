# SPDX-License-Identifier: Apache-2.0
"""`kvconform init`: finds the connector of a repository, and writes what judges it there and in CI."""
