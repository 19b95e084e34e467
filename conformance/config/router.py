# SPDX-License-Identifier: Apache-2.0
"""The router of a producer and a consumer: what it puts into the requests' kv_transfer_params.

A client's request goes to a producer, which computes the prompt, and then to a consumer. The router
in front of them (a proxy) makes the parameters of both. The setting `router` names a class of the
connector's author in place of `Router`.
"""

from __future__ import annotations

import importlib
from typing import Any

from kvconform.contract.scenario import HAND_OVER
from kvconform.errors import UsageError, one_line

Params = dict[str, Any] | None


class Router:
    """The router of vLLM's examples. It makes nothing itself: the producer's answer is passed on.

    `request` is a name that is unique in one run. `producer` is the producer's engine id.
    `shares_ids`: both engines get the client's request under one X-Request-Id. Their ids then
    differ in the random suffix of vLLM's input processor only. `at_once`: the consumer gets its
    request while the producer computes, as it need not know what the producer returns.
    """

    shares_ids = False
    at_once = False

    def prefill(self, request: str, producer: str) -> Params:
        """Return the kv_transfer_params of a request to the producer."""
        return dict(HAND_OVER)

    def decode(self, request: str, producer: str, sent: Params, returned: Params) -> Params:
        """Return the kv_transfer_params of a request to the consumer.

        `sent` are those that the producer's request had. `returned` are those that the producer's
        request_finished returned; None if the producer has not got there.
        """
        return returned


class SameId(Router):
    """A router of producers that find the consumer's request by its id, as NIXL's pushes do."""

    shares_ids = True


class Checked:
    """A router that was named by the setting `router`, or None for vLLM's own.

    UsageError in one sentence if it cannot be imported, raises, or returns no parameters.
    """

    def __init__(self, name: str | None) -> None:
        self.name = name
        self._router = Router() if name is None else _load(name)
        self.shares_ids = bool(getattr(self._router, "shares_ids", False))
        self.at_once = bool(getattr(self._router, "at_once", False))

    def prefill(self, request: str, producer: str) -> Params:
        """Return what `Router.prefill` does."""
        return self._ask("prefill", request, producer)

    def decode(self, request: str, producer: str, sent: Params, returned: Params) -> Params:
        """Return what `Router.decode` does."""
        return self._ask("decode", request, producer, sent, returned)

    def _ask(self, method: str, *arguments: Any) -> Params:
        try:
            found = getattr(self._router, method)(*arguments)
        except Exception as error:  # the user's class may raise anything
            raise UsageError(f"router {self.name}: {method} raised {one_line(error)}") from error
        if not isinstance(found, dict | None):
            kind = type(found).__name__
            raise UsageError(f"router {self.name}: {method} returned {kind}, not a dict or None")
        return found


def _load(name: str) -> Any:
    """Return an instance of the class `package.module:Class`."""
    module, _, cls = name.rpartition(":")
    try:
        return getattr(importlib.import_module(module), cls)()
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise UsageError(
            f"router {name} cannot be made: {one_line(error)}; "
            "name a class without arguments as package.module:Class"
        ) from error
