# SPDX-License-Identifier: Apache-2.0
"""The model that computes no attention: which tokens a request samples, which drafts are accepted, where it stops."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvconform.kernels.codes import mix64
from kvconform.provenance import Chain

STOP_TOKEN = 1
FIRST_TOKEN = 2
VOCABULARY = 50_000


def sample(chain: Chain, corruption: int = 0) -> int:
    """The next token: a function of the KV that was read (the last content id, and the digest of whatever bytes were wrong)."""
    return FIRST_TOKEN + mix64((chain.ids[-1] if chain.ids else 0) ^ corruption) % VOCABULARY


@dataclass
class Script:
    """What a case says about one request: accepted drafts per verification (the last repeats), output index of the stop token."""

    drafts: list[int] = field(default_factory=list)
    stop_at: int | None = None
    verified: int = 0

    def accepted(self, drafts: int) -> int:
        """How many of `drafts` draft tokens this verification accepts; advances the script."""
        if not drafts:
            return 0
        plan = self.drafts[min(self.verified, len(self.drafts) - 1)] if self.drafts else 0
        self.verified += 1
        return min(plan, drafts)

    def token(self, chain: Chain, prompt_len: int, corruption: int = 0) -> int:
        """The next token of `chain`, which is the stop token where the script says so."""
        if self.stop_at is not None and len(chain.ids) - prompt_len == self.stop_at:
            return STOP_TOKEN
        return sample(chain, corruption)
