# SPDX-License-Identifier: Apache-2.0
"""The contract of a connector as typed data, and the loader of `spec/`.

Events and traces, capabilities, the check language, requirements, cases, scenarios and profiles.
"""
