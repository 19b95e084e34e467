# SPDX-License-Identifier: Apache-2.0
"""Judge a few mutants of the reference connector on a few cases, and print the results as JSON.

A program of its own: the process must not have imported the connector.
"""

from __future__ import annotations

import json
from pathlib import Path

from kvconform.compat.installed import check_vllm
from kvconform.contract.loader import load_spec
from kvconform.dev.mutants.campaign import all_of
from kvconform.dev.mutants.mutation import Edit, Mutation, Site
from kvconform.dev.mutants.server import Server
from kvconform.dev.mutants.subject import subject

CASES = ("identity.two-salts", "lifecycle.hook-order", "preemption.in-decode")
WANTED = (
    "request_key [drop-component #2]",
    "ReferenceConnector._extend_table [equality] elif",
    "ReferenceConnector._extend_table [negate] if replaces:",
    "ReferenceConnector.get_num_new_matched_tokens [boundary] if matched <= 0:",
)
"""Parts of the sites of mutants that the operators make."""


def by_hand(server: Server, text: str) -> Mutation:
    """Return a mutation that begins `build_connector_meta` with `text`."""
    module = server.subject.modules[0]
    source = server.source(module)
    at = source.index(b"self._forget_preempted(scheduler_output")
    line = source.count(b"\n", 0, at) + 1
    return Mutation(Site(module, "", text, ""), Edit(at, at, f"{text}; "), (line, line), source)


def main() -> None:
    """Judge the mutants, and print the results."""
    reference = subject("reference")
    setup = reference.setups[0].model_copy(update={"engine": "reference"})
    small = reference.model_copy(update={"id": "small", "setups": [setup]})
    vllm, _ = check_vllm()
    found = {}
    with Server(
        small, load_spec(), vllm, Path.cwd(), explore=0, cases=CASES, hook_timeout=2.0
    ) as server:
        server.start()
        mutations = [
            each for each in all_of(server) if any(text in str(each.site) for text in WANTED)
        ]
        mutations += [
            by_hand(server, text)
            for text in ("import os; os._exit(3)", "exec('while True: pass')", "1 / 0")
        ]
        for each in mutations:
            found[str(each.site)] = json.loads(server.judge(each).to_json())
        server.limit = 0.0
        (short,) = (each for each in mutations if WANTED[3] in str(each.site))
        found["no time"] = json.loads(server.judge(short).to_json())
        server.limit = None
        module = server.subject.modules[0]
        source = server.source(module)
        broken = Mutation(Site(module, "", "import", ""), Edit(0, 0, "import none\n"), None, source)
        found["import"] = json.loads(server.judge(broken).to_json())
        found["original"] = {
            "failed": server.original.failed,
            "errors": server.original.errors,
            "runs": len(server.original.seconds),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
