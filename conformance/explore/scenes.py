# SPDX-License-Identifier: Apache-2.0
"""Random workloads around one situation that a random schedule hardly ever reaches.

Each scene draws lengths and times around what brings its situation about.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvconform.explore.dice import Dice
from kvconform.explore.workload import Data


@dataclass
class Scene:
    """The steps of a workload, its longest request with output, and what it needs."""

    steps: list[Data]
    longest: int
    config: Data = field(default_factory=dict)
    needs: str | None = None


def _add(name: str, prompt: int | Data, max_tokens: int, **more: object) -> Data:
    return {"add": {"req": name, "prompt": prompt, "max_tokens": max_tokens, **more}}


RUN: Data = {"run": {}}
DROP: list[Data] = [{"run": {}}, {"drop-local": {}}]
LAND: Data = {"land": 3}
"""Lands all steps in flight: there are at most three."""


def shorter_table(dice: Dice, block: int) -> Scene:
    """Preempt a request that reads no cache between two chunks: it resumes with fewer blocks."""
    chunk = dice.number(1, 2) * block + dice.pick([-1, 0, 0, 1])
    length = dice.number(2, 4) * chunk + dice.pick([0, 1])
    first = _add("a", length, 2, skip_reading_prefix_cache=True)
    steps = [first, {"step": dice.number(2, 3)}, LAND, {"preempt": "a"}]
    if dice.one_in(2):
        steps.append(_add("c", dice.number(1, 2 * block), 3))
    steps += [*DROP, _add("b", {"same": "a"}, 2, reloads="a"), RUN]
    return Scene(steps, length + 2, {"budget": max(1, chunk)})


def resumed(dice: Dice, block: int) -> Scene:
    """Preempt a request that repeats a stored prompt, and let it ask for the prompt again."""
    length = dice.number(1, 4) * block + dice.pick([0, 1, 2])
    steps = [_add("a", length, 1), *DROP, _add("b", {"same": "a"}, 9, reloads="a")]
    steps += [{"step": dice.number(2, 8)}, LAND, {"preempt": "b"}]
    steps += [{"drop-local": {}}] * dice.number(0, 1)
    if dice.one_in(2):
        steps.append(_add("c", dice.number(1, 2 * block), 4))
    return Scene([*steps, RUN], length + 9)


def beside_decodes(dice: Dice, block: int) -> Scene:
    """Compute a prompt with what decoding requests leave of the budget: one token, or two."""
    count = dice.number(2, 4)
    length = dice.number(1, 2) * block + dice.pick([0, 1])
    steps = [_add(f"d{number}", 1, length + 5) for number in range(count)]
    steps += [{"step": 2}, _add("a", length, 2), *DROP]
    steps += [_add("b", {"same": "a"}, 2, reloads="a"), RUN]
    budget = count + dice.pick([1, 1, 2])
    return Scene(steps, length + 7, {"budget": budget, "max_seqs": budget})


def no_room(dice: Dice, block: int) -> Scene:
    """Let a load end when a decoding neighbour has taken the rest of the pool."""
    blocks = dice.number(2, 4)
    more = block + dice.number(1, block)
    steps = [_add("a", blocks * block, 1), *DROP]
    steps += [_add("d", 2 * block - dice.number(1, 2), block + 5), {"step": dice.number(1, 2)}]
    steps.append(_add("b", {"of": "a", "then": more}, 2, priority=dice.pick([0, 0, 1])))
    if dice.one_in(2):
        steps.append(_add("c", dice.number(1, block), 1))
    pool = blocks + 4 + dice.pick([0, 0, 1])
    config = {"budget": 64, "max_seqs": dice.pick([2, 8]), "num_blocks": pool + 1}
    return Scene([*steps, RUN], blocks * block + more + 2, config)


def freed_at_once(dice: Dice, block: int) -> Scene:
    """Hand the blocks of a request that a sibling has loaded to the next one in the same step."""
    length = dice.number(2, 4) * block + 1
    other = length + dice.number(0, 2)
    steps = [_add("a", length, 1), RUN, _add("c", {"same": "a"}, dice.number(1, 4))]
    steps += [_add("e", other, 6), RUN, _add("d", {"same": "a"}, 2), RUN]
    config = {
        "budget": 64,
        "multi": dice.pick([["fetcher", "self"], ["self", "fetcher"]]),
        "num_blocks": -(-(other + 6) // block) + dice.number(2, 3),
        "prefix_caching": False,
    }
    return Scene(steps, other + 6, config)


def third_request(dice: Dice, block: int) -> Scene:
    """Store another prompt between the lookup of a prompt and the end of its load."""
    length = dice.number(2, 4) * block
    other = dice.number(4, 8) * block + dice.pick([0, 2])
    steps = [_add("a", length, 2), *DROP, _add("b", {"of": "a", "then": 1}, 2)]
    steps += [{"lookup-only": "b"}] * dice.number(0, 1)
    steps += [_add("e", other, 2), RUN]
    return Scene(steps, other + 2, {"budget": 256})


def fails_beside(dice: Dice, block: int) -> Scene:
    """Let two or three requests load different prompts in one step, of which one load fails."""
    length = dice.number(2, 4) * block + dice.pick([0, 1, 2])
    sources = "abc"[: dice.number(2, 3)]
    steps = [_add(name, length, 1) for name in sources]
    steps += DROP
    failing = dice.number(0, len(sources) - 1)
    positions = dice.pick(["all", [dice.number(0, length - 1)]])
    for number, (name, source) in enumerate(zip("def", sources, strict=False)):
        steps.append(_add(name, {"same": source}, dice.number(1, 3)))
        if number == failing:
            steps.append({"fail-load": {"req": name, "positions": positions}})
    steps += [*DROP, _add("g", {"same": dice.pick(list(sources))}, 2), RUN]
    return Scene(steps, length + 3, {"budget": dice.pick([64, block + 1])})


def fails_again(dice: Dice, block: int) -> Scene:
    """Let loads of two requests into the same few blocks fail, while a chunk rests on each."""
    blocks = dice.number(2, 4)
    more = block + dice.number(1, block)
    last = blocks * block + more
    fail: Data = {"req": "d"}
    if dice.one_in(2):
        fail["positions"] = [0, dice.number(0, blocks * block - 1)]
    steps = [_add("a", blocks * block, 1), *DROP, _add("b", {"of": "a", "then": more}, 1)]
    steps += [{"fail-load": {"req": "b"}}, RUN, _add("c", {"same": "a"}, 1), *DROP]
    steps += [_add("d", {"same": "b"}, 1), {"fail-load": fail}, RUN]
    steps += [_add("e", {"same": "b"}, 1), *DROP, _add("f", {"same": "b"}, 1), RUN]
    config = {
        "budget": dice.pick([block, block, 64]),
        "num_blocks": -(-(last + 1) // block) + dice.number(1, 2),
        "load_failure_policy": "fail",
    }
    return Scene(steps, last + 1, config)


def ends_while_saving(dice: Dice, block: int) -> Scene:
    """End a request whose prompt was loaded, and give its blocks to one that waits for memory."""
    blocks, output = dice.number(2, 4), dice.number(block, 2 * block + 1)
    last = blocks * block + 2 + output
    needed = -(-last // block)
    steps = [_add("a", blocks * block, 1), *DROP, _add("b", {"of": "a", "then": 2}, output)]
    steps += [{"step": dice.number(1, 2)}, _add("c", (needed - 1) * block + 2, 2), *DROP]
    steps += [_add("d", {"of": "b", "outputs": True, "then": 1}, 2, reloads="b"), RUN]
    return Scene(steps, last + 3, {"budget": 64, "num_blocks": needed + dice.number(2, 3)})


def session(dice: Dice, block: int) -> Scene:
    """Continue a session, and ask for its tokens again. It may be preempted in each turn.

    It may be given images, which who asks again has not.
    """
    length = dice.number(1, 3) * block + dice.pick([0, 1, 2])
    steps: list[Data] = [_add("a", length, dice.number(1, 5), session=True)]
    steps += _maybe_preempted(dice, 12)
    longest = length + 5
    for _ in range(dice.number(1, 3)):
        then, more = dice.number(1, 2 * block), dice.number(1, 5)
        longest += then + more
        given: Data = {"req": "a", "then": then, "max_tokens": more}
        if dice.one_in(4):
            at = dice.number(0, then - 1)
            size = dice.number(1, then - at)
            given["mm"] = [{"at": at, "length": size, "id": f"{dice.pick('xy')}{size}"}]
        steps += [{"continue": given}]
        steps += _maybe_preempted(dice, dice.number(1, 12))
    steps += [{"continue": {"req": "a", "then": 0}}, *DROP]
    steps += [_add("b", {"of": "a", "outputs": True, "then": 1}, 2), RUN]
    return Scene(steps, longest + 3, {"budget": dice.pick([64, 64, block + 1])})


def _maybe_preempted(dice: Dice, steps: int) -> list[Data]:
    """Return so many steps, in the first of which request a may be preempted."""
    if not dice.one_in(3):
        return [{"step": steps}]
    return [{"schedule": dice.number(1, 2)}, {"preempt": "a"}, {"step": steps}]


def soaked(dice: Dice, block: int) -> Scene:
    """Repeat a few requests in many rounds, or the like of them with other prompts.

    What the connector holds must not grow, and new prompts come back as before.
    """
    length = dice.number(1, 3) * block + dice.pick([0, 1])
    steps = [_add("a", length, dice.number(1, 5))]
    event = dice.pick(["abort", "preempt", "run", "together", "twins"])
    if event in ("abort", "preempt"):
        steps += [{"step": dice.number(1, 3)}, {event: "a"}]
    steps += [] if event in ("together", "twins") else list(DROP)
    prompt: Data = {"of": "a", "then": dice.number(1, block)}
    rounds: Data = {"rounds": 4, "fresh": True} if dice.one_in(3) else {"rounds": 4}
    config: Data = {"budget": 64}
    if event == "twins":  # the same KV is computed and saved twice at once
        prompt, rounds = {"same": "a"}, {"rounds": 4, "fresh": True}
        config["prefix_caching"] = False
    steps += [_add("b", prompt, 2), *DROP]
    return Scene([*steps, {"soak": rounds}], length + block + 5, config)


def taken_id(dice: Dice, block: int) -> Scene:
    """Abort a request with a salt before it gets memory, and use its id for one without.

    What that computes is nothing to others with the salt, and comes back to those without.
    """
    length = dice.number(1, 3) * block + dice.pick([0, 1, 2])
    steps = [_add("a", length, 2, salt="s"), *[{"lookup-only": "a"}] * dice.number(1, 2)]
    steps += [{"abort": "a"}]
    prompt: Data = {"same": "a"} if dice.one_in(2) else {"of": "a", "then": dice.number(1, block)}
    steps += [_add("b", prompt, dice.number(1, 4), id="a"), *DROP]
    steps += [_add("c", {"same": "a"}, 2, salt="s"), _add("d", {"same": "b"}, 2, reloads="b"), RUN]
    return Scene(steps, length + block + 5, {"budget": dice.pick([64, block + 1])})


def engines_in_turn(dice: Dice, block: int) -> Scene:
    """Let engines follow each other in one process: what they leave there must not grow."""
    length = dice.number(1, 3) * block + dice.pick([0, 1])
    restart: Data = {"restart": dice.pick(["engine", "another-engine", "another-engine"])}
    event, after = dice.pick(["abort", "preempt", None]), dice.number(1, 3)
    steps: list[Data] = []
    for name in "abc":
        steps.append(_add(name, {"same": "a"} if steps else length, 5))
        steps += [{"step": after}, LAND, {event: name}] if event else []
        steps += [RUN, {**restart}]
    return Scene([*steps, _add("d", {"same": "a"}, 2), RUN], length + 5, {"budget": 64})


def with_grammar(dice: Dice, block: int) -> Scene:
    """Let requests that repeat a stored prompt wait for their grammars, and abort one of them."""
    length = dice.number(1, 3) * block + dice.pick([0, 1, 2])
    steps = [_add("a", length, 2), *DROP]
    steps.append(_add("b", {"same": "a"}, 5, structured=True, reloads="a"))
    steps.append(_add("c", {"of": "a", "then": dice.number(1, block)}, 3, structured=True))
    steps += [{"step": dice.number(1, 3)}]
    if dice.one_in(2):
        steps += [{"abort": "c"}, {"grammar": "b"}]
    else:
        steps += [{"grammar": "c"}, {"step": dice.number(1, 2)}, {"grammar": "b"}]
    steps += [{"step": dice.number(1, 4)}, *[{"preempt": "b"}] * dice.number(0, 1)]
    return Scene([*steps, RUN], length + block + 5, {"budget": dice.pick([64, block + 1])})


def damaged(dice: Dice, block: int) -> Scene:
    """Damage the files of a stored prompt between its lookup and its load, and ask once more."""
    length = dice.number(1, 4) * block + dice.pick([0, 1, 2])
    how = dice.pick(["removed", "truncated", "longer", "garbage"])
    every = {"every": 2} if dice.one_in(4) else {}
    steps = [_add("a", length, 2), *DROP, {"damage": {"files": how, **every}}]
    steps.append(_add("b", {"same": "a"}, 3))
    if dice.one_in(2):
        steps.append(_add("c", {"of": "a", "then": dice.number(1, block)}, 2))
    steps += [*DROP, _add("d", {"same": "a"}, 2), RUN]
    # A load that fails in an asynchronous step is a known bug of vLLM with the other policy.
    return Scene(steps, length + block + 3, {"load_failure_policy": "fail"})


def killed(dice: Dice, block: int) -> Scene:
    """Kill the process while it saves a prompt, and ask its successor for what it has stored.

    The first request makes what is made once, the second one shows how a save goes.
    """
    length = dice.number(1, 4) * block + dice.pick([0, 1, 2])
    steps = [_add("z", length, 1), *DROP, _add("a", length, 1), *DROP]
    if dice.one_in(3):
        steps.append(_add("n", dice.number(1, 2 * block), dice.number(1, 6)))
        steps += [{"step": dice.number(1, 3)}] * dice.number(0, 1)
    steps += [_add("b", length, dice.number(1, 3))]
    steps.append({"restart": {"killed_at": dice.pick([0.2, 0.4, 0.6, 0.8])}})
    steps += [_add("c", {"same": "b"}, 2)]
    if dice.one_in(2):
        steps.append(_add("d", {"of": "b", "then": dice.number(1, block)}, 2))
    steps += [_add("e", {"same": "a"}, 2), *DROP, _add("f", {"same": "b"}, 2, reloads="c"), RUN]
    return Scene(steps, length + block + 6, {"budget": dice.pick([64, block + 1])}, "persistent")


def full_disk(dice: Dice, block: int) -> Scene:
    """Fill the disk after a prompt was stored; ask for it, and for what is saved from then on."""
    length = dice.number(2, 4) * block + dice.pick([0, 1, 2])
    more = dice.number(block, 2 * block)
    steps = [_add("a", length, 2), *DROP, {"damage": {"disk": "full"}}]
    steps.append(_add("b", {"of": "a", "then": more}, dice.number(2, block)))
    if dice.one_in(2):
        steps += [{"step": dice.number(1, 3)}, {"preempt": "b"}]
    steps += [*DROP, _add("c", {"same": "b"}, 2), *DROP, _add("d", {"same": "a"}, 2), RUN]
    config = {"load_failure_policy": "fail", "budget": dice.pick([64, block + 1])}
    return Scene(steps, length + more + block + 3, config)


def forbidden(dice: Dice, block: int) -> Scene:
    """Ask for what a request has computed whose client forbids to store it."""
    length = dice.number(1, 3) * block + dice.pick([0, 1, 2])
    output = dice.number(2, 2 * block)
    steps = [_add("a", length, output, skip_save=True)]
    if dice.one_in(2):
        steps += [{"step": dice.number(1, 4)}, LAND, {"preempt": "a"}]
    steps += [*DROP, _add("b", {"of": "a", "outputs": True, "then": 2}, 3)]
    steps += [*DROP, _add("c", {"same": "a"}, 2), RUN]
    config = {"budget": dice.pick([64, block + 1])}
    return Scene(steps, length + output + 5, config, "skip_save and store")


def reset_in_chunk(dice: Dice, block: int) -> Scene:
    """Reset the connector's cache between two chunks of a prompt that end within a block."""
    length = dice.number(2, 4) * block + dice.pick([0, 1])
    steps = [_add("a", length, 2), {"step": dice.number(1, 2)}, LAND]
    steps.append({"reset": {"running": dice.one_in(4), "connector": True}})
    steps += [*DROP, _add("b", {"same": "a"}, 2), *DROP]
    steps += [_add("c", {"same": "a"}, 2, reloads="b"), RUN]
    return Scene(steps, length + 2, {"budget": dice.pick([block // 2, block - 1, block + 2])})


def resets_overtake(dice: Dice, block: int) -> Scene:
    """Reset the connector's cache in step after step while a save is under way, or in rounds.

    Two ranks may end the save in different steps.
    """
    length = dice.number(2, 4) * block + dice.pick([0, 1])
    reset: Data = {"reset": {"running": False, "connector": True}}
    steps = [_add("a", length, dice.number(1, 4)), {"step": dice.number(1, 3)}, reset]
    if dice.one_in(2):
        rounds: Data = {"rounds": dice.number(3, 5), **({"fresh": True} if dice.one_in(2) else {})}
        steps += [*DROP, {"soak": rounds}]
    else:
        steps += [{"idle": 1}, reset] * dice.number(2, 6)
    steps += [*DROP, _add("b", {"same": "a"}, 2), *DROP]
    steps += [_add("c", {"same": "a"}, 2, reloads="b"), RUN]
    ranks = {"tensor_parallel": 2} if dice.one_in(2) else {}
    return Scene(steps, length + 4, {"budget": 64, **ranks})


def reset_under_loads(dice: Dice, block: int) -> Scene:
    """Reset the connector's cache while a load may be under way, and store another prompt then."""
    length = dice.number(2, 4) * block + dice.pick([0, 1])
    steps = [_add("a", length, 2), *DROP, _add("b", {"same": "a"}, 3), {"step": 1}]
    steps += [{"reset": {"running": False, "connector": True}}]
    steps += [_add("c", length + dice.pick([0, 1, block]), dice.number(2, 6))]
    steps += [*DROP, _add("d", {"same": "a"}, 2), *DROP]
    steps += [_add("e", {"same": "c"}, 2), RUN]
    return Scene(steps, length + block + 6, {"budget": dice.pick([64, block + 1])})


def controlled(dice: Dice, block: int) -> Scene:
    """Let an operator do something with a stored prompt, and ask for it again."""
    length = dice.number(1, 3) * block + dice.pick([0, 1])
    do = dice.pick(["lookup", "clear", "move", "pin", "compress"])
    control: Data = {"do": do, "of": "a"}
    if do == "move":
        control["to"] = dice.pick(["first", "last"])
    steps = [_add("a", length, 2), *DROP, {"control": control}]
    if dice.one_in(2):
        steps += [_add("c", dice.number(2, 4) * block, 2), *DROP]
    steps += [_add("b", {"same": "a"}, 2, reloads="a"), RUN]
    steps += [{"control": {"do": "unpin", "of": "a"}}] * (do == "pin")
    return Scene(steps, 4 * block + 3, {"budget": 64}, f"store and '{do}' in cap.controller")


def states_and_drafts(dice: Dice, block: int) -> Scene:
    """Complete blocks of a model with recurrent layers by drafts, and load their states.

    A prompt in chunks of several blocks moves the blocks for the states after drafts.
    """
    drafts = dice.number(1, 3)
    length = dice.number(1, 4) * block + dice.number(0, block - 1)
    tokens = dice.number(2, block + 6)
    accepted = [dice.number(0, drafts) for _ in range(dice.number(1, 4))]
    steps = [_add("a", length, tokens, drafts=accepted)]
    if dice.one_in(2):
        steps += [{"step": dice.number(2, 6)}, LAND, {"preempt": "a"}]
    then = dice.number(1, block)
    outputs: Data = {"of": "a", "outputs": True, "then": then}
    steps += [*DROP, _add("b", outputs, dice.number(1, 6), drafts=[dice.number(0, drafts)])]
    steps += [*DROP] if dice.one_in(2) else [{"step": dice.number(1, 3)}]
    shorter = dice.number(1, length)
    steps += [_add("c", {"of": "a", "tokens": shorter, "then": then}, 3, drafts=[1]), *DROP]
    steps += [_add("d", {"of": "b", "outputs": True, "then": 1}, 2), RUN]
    config: Data = {
        "groups": dice.pick([["full", "state"], ["full", "sliding", "state"]]),
        "window": dice.pick([5, 6, 8, 11]),
        "spec_tokens": drafts,
        "budget": dice.pick([64, 2 * block + 1, block + 2]),
        "retention_interval": dice.pick([0, None, None]),
    }
    if dice.one_in(3):
        config["prefix_match_unit"] = block // 2
    if dice.one_in(3):  # the drafter has attention
        config |= {"groups": ["full", "state", "full"], "drafter": True}
    return Scene(steps, length + 2 * tokens + then + 9, config)


@dataclass(frozen=True)
class Kind:
    """A kind of scene, and the engines that can run it."""

    draw: Callable[[Dice, int], Scene]
    engines: tuple[str, ...] = ("reference", "vllm")


SCENES = (
    Kind(shorter_table),
    Kind(resumed),
    Kind(beside_decodes),
    Kind(no_room),
    Kind(freed_at_once),
    Kind(third_request),
    Kind(fails_beside),
    Kind(fails_again),
    Kind(ends_while_saving),
    Kind(session),
    Kind(states_and_drafts, ("vllm",)),
    Kind(soaked),
    Kind(taken_id),
    Kind(engines_in_turn),
    Kind(with_grammar, ("vllm",)),
    Kind(damaged),
    Kind(killed),
    Kind(full_disk),
    Kind(forbidden),
    Kind(reset_in_chunk),
    Kind(resets_overtake),
    Kind(reset_under_loads),
    Kind(controlled),
)
