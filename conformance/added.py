# SPDX-License-Identifier: Apache-2.0
"""The requests that a case adds: the argument of the step `add`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field, PositiveInt, Tag

from kvconform.requirement import Model

Req = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", description="a request's name within the case")]
Natural = Annotated[int, Field(ge=0)]


class SamePrompt(Model):
    """The prompt of another request."""

    same: Req


class OfPrompt(Model):
    """The first `tokens` tokens of another request (its whole prompt if absent; with `outputs` its output too), `then` new ones."""

    of: Req
    tokens: PositiveInt | None = None
    outputs: bool = False
    then: Natural = 0


def _prompt_form(value: Any) -> str:
    if isinstance(value, SamePrompt) or (isinstance(value, dict) and "same" in value):
        return "same"
    return "of" if isinstance(value, (OfPrompt, dict)) else "length"


Prompt = Annotated[
    Annotated[PositiveInt, Tag("length")] | Annotated[SamePrompt, Tag("same")] | Annotated[OfPrompt, Tag("of")],
    Discriminator(_prompt_form),
]


class MultiModal(Model):
    """An image or the like at token `at` of the prompt, `length` tokens long; `id` decides whether two are the same."""

    at: Natural
    length: PositiveInt
    id: str


class Handed(Model):
    """The parameters that request `of` ended with; `alter` changes values, so that what they refer to does not exist."""

    of: Req
    alter: dict[str, Any] = {}


def _handed(value: Any) -> Any:
    return {"of": value} if isinstance(value, str) else value


HandedFrom = Annotated[Handed, BeforeValidator(_handed, json_schema_input_type=Req | Handed)]


class Add(Model):
    """A new request. `prompt`: its length in tokens, or another request. `drafts`: drafts accepted per verify step, the last repeats."""

    req: Req
    prompt: Prompt
    max_tokens: PositiveInt = 4
    salt: str | None = None
    lora: str | None = None
    mm: list[MultiModal] = []
    priority: int = 0
    params: dict[str, Any] = Field(default={}, description="kv_transfer_params")
    hand_over: bool = Field(default=False, description="ask for its KV to be handed over, as a proxy does of a prefill engine")
    handed: HandedFrom | None = Field(default=None, description="kv_transfer_params: what this request of the other engine ended with")
    drafts: list[Natural] | None = None
    stop_at: Natural | None = Field(default=None, description="output index at which the stop token is sampled")
    skip_reading_prefix_cache: bool = False
    structured: bool = Field(default=False, description="has a grammar, which is being compiled until step `grammar`; engine vllm only")
    reloads: Req | None = Field(default=None, description="repeats this request's content: its lookup says how much of it came back")
    id: str | None = Field(default=None, description="the client's request id; the same id twice is id reuse")

    def mentions(self) -> set[str]:
        """The other requests that it refers to."""
        found = {self.reloads} if self.reloads else set()
        if isinstance(self.prompt, SamePrompt):
            found.add(self.prompt.same)
        elif isinstance(self.prompt, OfPrompt):
            found.add(self.prompt.of)
        if self.handed is not None:
            found.add(self.handed.of)
        return found


class AddMany(Model):
    """`count` requests named req0, req1, ...; lists are cycled through."""

    req: Req
    count: PositiveInt
    prompt: PositiveInt | list[PositiveInt]
    max_tokens: PositiveInt | list[PositiveInt] = 4
    drafts: list[Natural] | None = None

    def each(self) -> list[Add]:
        """The requests one by one."""

        def pick(value: int | list[int], index: int) -> int:
            return value[index % len(value)] if isinstance(value, list) else value

        return [
            Add(req=f"{self.req}{i}", prompt=pick(self.prompt, i), max_tokens=pick(self.max_tokens, i), drafts=self.drafts)
            for i in range(self.count)
        ]
