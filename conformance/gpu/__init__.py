# SPDX-License-Identifier: Apache-2.0
"""`kvconform gpu`: all checks that need a GPU, in order of worth and within a time limit."""
