# SPDX-License-Identifier: Apache-2.0
"""Mutation testing of correct connectors: `nox -s mutants`, `python -m kvconform.dev.mutants`.

A mutant is a correct connector with one small change in its source. The suite should find it
NOT CONFORMANT; one that it does not find points to a situation that no case brings about, unless
the change has no effect that the contract is about.
"""
