# SPDX-License-Identifier: Apache-2.0
"""`kvconform pack`: a folder that runs kvconform where there is torch and no package index."""
