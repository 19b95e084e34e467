# SPDX-License-Identifier: Apache-2.0
"""`kvconform explore`: random workloads and abort races; a failing one is shrunk to a case."""
