# SPDX-License-Identifier: Apache-2.0
"""What is asked of a connector, as typed data.

Events and traces, capabilities, the check language, requirements, cases, scenarios and profiles, and the loader of `spec/`.
"""
