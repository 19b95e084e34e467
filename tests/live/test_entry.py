# SPDX-License-Identifier: Apache-2.0
"""Tests of requests that enter by HTTP, without a server: what is sent, and what must arrive."""

from __future__ import annotations

import base64
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from kvconform.contract.events import altered_in_entry, check_event
from kvconform.contract.loader import load_spec
from kvconform.contract.scenario import Scenario
from kvconform.dev.defect import load_defects
from kvconform.dev.defects import in_force_for
from kvconform.fixtures import tiny_blip, tiny_lora, tiny_tokenizer
from kvconform.judge.describe import describe
from kvconform.live.job import Answer, Ask, Counts, Outcome, PhaseDone, plays
from kvconform.live.plugin import FAULT

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from kvconform.live.engine import make_run  # noqa: E402
from kvconform.live.entry import Entries, body, embeddings  # noqa: E402
from kvconform.live.events import compare  # noqa: E402
from kvconform.live.state import Roster  # noqa: E402

SPEC = load_spec(live=True)
ASKS = [
    Ask(id="r0.salt-blue", tokens=[5, 6, 7], out=4, entrypoint="completions", salt="blue"),
    Ask(id="r0.lora-ode@2", tokens=[5, 6, 7], out=4, entrypoint="completions", lora="ode@2"),
    Ask(id="r1.embeds-song", tokens=[0] * 40, out=4, entrypoint="completions", embeds="song"),
    Ask(id="r2.salt-red", tokens=[5, 6, 7], out=4, entrypoint="chat", salt="red"),
    Ask(id="r3.image-cat", tokens=[512] * 4 + [5, 6], out=4, entrypoint="chat", image="cat"),
    Ask(id="r4.salt-red", tokens=[5, 6, 7], out=4, entrypoint="embeddings", salt="red"),
]
IDS = [
    "cmpl-r0.salt-blue-0-8082d041",
    "cmpl-r0.lora-ode@2-0-8082d041",
    "cmpl-r1.embeds-song-0-8082d041",
    "chatcmpl-r2.salt-red-8082d041",
    "chatcmpl-r3.image-cat-8082d041",
    "embd-r4.salt-red-0-8082d041",
]
SALTED, ADAPTED, EMBEDDED, CHATTED, SHOWN, POOLED = range(6)


def request(number: int, **other: Any) -> Any:
    """The vLLM request that a request of ASKS becomes."""
    ask = ASKS[number]
    lora = ask.lora and SimpleNamespace(lora_name="ode", lora_path=f"/adapters/{ask.lora}")
    fields: dict[str, Any] = {
        "request_id": IDS[number],
        "cache_salt": ask.salt,
        "lora_request": lora,
        "prompt_embeds": ask.embeds and embeddings(ask.embeds, len(ask.tokens)),
        "all_token_ids": [*ask.tokens, 9],
        "num_prompt_tokens": len(ask.tokens),
        "mm_features": [SimpleNamespace(identifier=f"of {ask.image}")] if ask.image else [],
    }
    return SimpleNamespace(**fields | other)


def entered(number: int, **other: Any) -> dict[str, Any]:
    """The live.entered event of a request."""
    fields = Entries(ASKS).fields(request(number, **other))
    assert fields is not None
    event = {"kind": "live.entered", "seq": 0, "step": 0, **fields}
    assert check_event(event) == []
    return event


# -- scenarios
REQUESTS = [{"tail": 40, "salt": "blue"}]
SERVED = {"entrypoint": "completions", "start": {"processes": True}, "requests": REQUESTS}


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"entrypoint": None}, "need an `entrypoint`"),
        ({"entrypoint": "responses"}, "entrypoint"),
        ({"start": {}}, "start.processes"),
        ({"requests": [{"tail": 40, "abort": 2}]}, "abort"),
        ({"requests": [{"shared": 9, "embeds": "song"}]}, "shared"),
        ({"entrypoint": "chat", "requests": [{"tail": 9, "embeds": "song"}]}, "completions"),
        ({"requests": [{"tail": 9, "image": "cat"}]}, "chat"),
        ({"requests": [{"tail": 40, "lora": "a/b"}]}, "lora"),
        ({"requests": [{"tail": 9, "lora": x} for x in ("ode", "ode@2")]}, "two versions"),
        ({"requests": [], "workload": "conversation"}, "needs `requests`"),
    ],
)
def test_a_scenario_with_a_wrong_entrypoint_does_not_load(
    other: dict[str, Any], sentence: str
) -> None:
    Scenario.model_validate({"id": "x", "text": "t", **SERVED})
    with pytest.raises(ValidationError, match=sentence):
        Scenario.model_validate({"id": "x", "text": "t", **SERVED, **other})


def test_tenants_send_the_same_tokens_under_names_of_their_own() -> None:
    scenario = SPEC.scenarios["live.entry-salt"]
    first, second = plays(scenario, None, 0)
    assert {ask.id for ask in first.asks} >= {"r0.salt-blue", "r0.salt-red", "r0", "r1.salt-red"}
    asks = {ask.id: ask for ask in (*first.asks, *second.asks)}
    assert asks["r0.salt-blue"].tokens == asks["r0.salt-red"].tokens == asks["r0"].tokens
    assert asks["r0"].tokens != asks["r1.salt-red"].tokens
    assert all(ask.entrypoint == "completions" for ask in asks.values())


def test_the_tokens_of_an_image_precede_the_words() -> None:
    cat, dog, red, alone = plays(SPEC.scenarios["live.entry-image"], None, 0)[0].asks
    assert cat.tokens == dog.tokens == red.tokens == [tiny_blip.IMAGE] * 4 + alone.tokens
    assert cat.words == alone.words == alone.tokens
    assert {cat.image, dog.image, red.image} == {"cat", "dog"} and alone.image is None


# -- what is sent
def test_what_tells_requests_apart_is_sent() -> None:
    salted, adapted, embedded, chatted, shown, pooled = map(body, ASKS)
    assert (salted["cache_salt"], salted["prompt"], salted["model"]) == ("blue", [5, 6, 7], "tiny")
    assert adapted["model"] == "ode" and "cache_salt" not in adapted
    sent = torch.load(io.BytesIO(base64.b64decode(embedded["prompt_embeds"])), weights_only=True)
    assert torch.equal(sent, embeddings("song", 40)) and "prompt" not in embedded
    assert pooled == {"model": "tiny", "priority": 0, "cache_salt": "red", "input": [5, 6, 7]}
    assert chatted["cache_salt"] == "red"
    assert chatted["messages"] == [{"role": "user", "content": "<t5> <t6> <t7>"}]
    image, text = shown["messages"][0]["content"]
    assert text == {"type": "text", "text": "<t5> <t6>"}
    file = io.BytesIO(base64.b64decode(image["image_url"]["url"].partition(",")[2]))
    from PIL import Image

    assert Image.open(file).tobytes() == tiny_blip.pixels("cat").tobytes()


def test_contents_differ_and_share_nothing() -> None:
    assert not bool((embeddings("song", 9) == embeddings("speech", 9)).any())
    assert torch.equal(embeddings("song", 40)[:9], embeddings("song", 9))


def test_the_tokenizer_and_its_template_give_back_the_token_ids(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(tiny_tokenizer.make(tmp_path / "tokenizer")))
    ids = list(range(512))
    message = {"role": "user", "content": tiny_tokenizer.text(ids)}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    assert tokenizer(text)["input_ids"] == ids


def test_the_model_that_takes_images_is_complete(tmp_path: Path) -> None:
    folder = tiny_blip.make(tmp_path / "blip")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Blip2ForConditionalGeneration"], "vLLM goes by it"
    cat, again, dog = (tiny_blip.pixels(name).tobytes() for name in ("cat", "cat", "dog"))
    assert cat == again != dog


def test_adapters_differ_by_name_and_are_the_same_every_time(tmp_path: Path) -> None:
    one, other, again = (
        (tiny_lora.make(tmp_path / folder) / "adapter_model.safetensors").read_bytes()
        for folder in ("ode", "ode@2", "again/ode")
    )
    assert one != other and one == again


# -- what is answered
@pytest.mark.parametrize("number", [SALTED, CHATTED])
def test_an_answer_has_tokens_and_probabilities(number: int) -> None:
    from kvconform.live.served import answer_of

    likely = [(5, -0.1), (6, -1.6)]
    choice: dict[str, Any] = {"token_ids": [5], "finish_reason": "length"}
    if ASKS[number].entrypoint == "chat":
        entries = [{"token": f"token_id:{token}", "logprob": value} for token, value in likely]
        choice["logprobs"] = {"content": [{**entries[0], "top_logprobs": entries}]}
    else:
        choice["logprobs"] = {"top_logprobs": [{f"token_id:{t}": value for t, value in likely}]}
    found = answer_of(ASKS[number], {"choices": [choice]})
    assert (found.id, found.prompt, found.why) == (ASKS[number].id, [5, 6, 7], "length")
    assert (found.tokens, found.logprobs, found.seconds, found.gaps) == ([5], [-0.1], [6], [1.5])


def test_the_answer_to_a_request_for_an_embedding_is_a_vector() -> None:
    from kvconform.live.served import answer_of

    found = answer_of(ASKS[POOLED], {"data": [{"embedding": [0.12345678, -0.5]}]})
    assert (found.embedding, found.tokens, found.why) == ([0.123457, -0.5], [], "stop")


# -- what arrives
@pytest.mark.parametrize("number", range(len(ASKS)))
def test_a_request_that_arrives_as_it_was_sent(number: int) -> None:
    assert altered_in_entry(entered(number)) == []


@pytest.mark.parametrize(
    ("number", "other", "lost"),
    [
        (SALTED, {"cache_salt": None}, ["salt"]),
        (CHATTED, {"cache_salt": "blue"}, ["salt"]),
        (POOLED, {"cache_salt": None}, ["salt"]),
        (ADAPTED, {"cache_salt": "blue"}, ["salt"]),
        (ADAPTED, {"lora_request": None}, ["adapter", "weights"]),
        (
            ADAPTED,
            {"lora_request": SimpleNamespace(lora_name="ode", lora_path="/adapters/ode")},
            ["weights"],
        ),
        (EMBEDDED, {"prompt_embeds": embeddings("speech", 40)}, ["prompt"]),
        (EMBEDDED, {"prompt_embeds": None}, ["prompt"]),
        (SHOWN, {"mm_features": []}, ["image"]),
        (CHATTED, {"all_token_ids": [1, 5, 6, 7], "num_prompt_tokens": 4}, ["prompt"]),
    ],
)
def test_what_is_lost_on_the_way_is_named(
    number: int, other: dict[str, Any], lost: list[str]
) -> None:
    event = entered(number, **other)
    assert altered_in_entry(event) == lost
    assert ASKS[number].id in describe(event)


def test_two_images_with_one_identifier_are_taken_for_the_first() -> None:
    other = Ask(id="r3.image-dog", tokens=[512] * 4, out=4, entrypoint="chat", image="dog")
    entries = Entries([*ASKS, other])
    found = [
        entries.fields(request(SHOWN, request_id=f"chatcmpl-{name}-8082d041", mm_features=[seen]))
        for name, identifier in (
            ("r3.image-cat", "a"),
            ("r3.image-dog", "b"),
            ("r3.image-dog", "a"),
        )
        for seen in [SimpleNamespace(identifier=identifier)]
    ]
    seen = [(each["image"], each["sent_image"]) for each in found if each is not None]
    assert seen == [("cat", "cat"), ("dog", "dog"), ("cat", "dog")]


def test_requests_of_others_are_not_ours() -> None:
    entries = Entries(ASKS)
    assert entries.sent("cmpl-warmup-0-8082d041") is None
    assert entries.sent("chatcmpl-r0.salt-blue-8082d041") is None  # sent to the other entrypoint
    assert Entries().sent(IDS[0]) is None
    assert Entries.read(None).asks == {}


def test_tokens_of_altered_requests_are_not_compared() -> None:
    fields: dict[str, Any] = {"logprobs": [-1.0], "seconds": [9], "gaps": [1.0], "why": "length"}
    plain, other = (Answer(id="r0", prompt=[1], tokens=[token], **fields) for token in (5, 6))
    outcome = Outcome()
    outcome.phases = [PhaseDone(name="p", reset_done=None, counts=Counts(), answers=[other])]
    assert [event["same"] for event in compare({"r0": plain}, outcome)] == [False]
    assert compare({"r0": plain}, outcome, {"r0"}) == []


def test_an_embedding_is_compared_value_by_value() -> None:
    none: dict[str, Any] = {"tokens": [], "logprobs": [], "seconds": [], "gaps": []}
    plain, other = (
        Answer(id="r0", prompt=[1, 2], embedding=values, why="stop", **none)
        for values in ([0.6, -0.8], [0.6, -0.79])
    )
    outcome = Outcome()
    outcome.phases = [PhaseDone(name="p", reset_done=None, counts=Counts(), answers=[other])]
    [event] = compare({"r0": plain}, outcome)
    assert (event["kind"], event["at"], event["off"]) == ("live.embedding", 1, 0.01)
    assert event["off"] > event["rounding"]
    assert check_event({**event, "seq": 0, "step": 0}) == []
    assert "value 1 of the embedding is off by 0.01" in describe(event)
    [same] = compare({"r0": other}, outcome)
    assert same["off"] == 0.0


def test_embeddings_are_told_apart_block_by_block() -> None:
    roster = Roster(block_size=32)
    long = embeddings("song", 64)
    mixed = torch.cat([long[:32], embeddings("speech", 32)])
    chains = []
    for name, embeds in (("a", long), ("b", mixed), ("c", None)):
        one = request(
            EMBEDDED, request_id=name, prompt_embeds=embeds, all_token_ids=[0] * 64, mm_features=[]
        )
        roster.add(one)
        chains.append(roster.chain(one))
    (song, plain), (other, also_plain), (zeros, _) = chains
    assert song[:32] == other[:32] and song[32] != other[32] and song[0] != zeros[0]
    assert plain == also_plain == zeros


# -- planted faults
def test_a_fault_of_a_live_defect_is_named_to_the_processes_of_vllm_only() -> None:
    defect = load_defects(load_spec())["entry-drops-salt"]
    with in_force_for(defect, defect.fault()):
        assert os.environ[FAULT] == defect.engine_fault
    assert FAULT not in os.environ


@pytest.mark.parametrize("baseline", [True, False])
def test_a_baseline_run_has_no_fault(
    baseline: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvconform.config.target import Target
    from kvconform.contract.scenario import Start
    from kvconform.live import engine
    from kvconform.live.process import Ended

    seen: dict[str, Any] = {}

    def run(command: list[str], **options: Any) -> Ended:
        seen["command"] = command
        seen.update(options["environment"])
        return Ended("exit", 0, 0.0)

    monkeypatch.setenv(FAULT, "a.b:c")
    monkeypatch.setattr(engine, "run", run)
    target = None if baseline else Target("kvconform.refimpl.connector:ReferenceConnector", {})
    (play, *_) = plays(SPEC.scenarios["live.entry-salt"], None, 0)
    make_run(Start(processes=True), [play], target, tmp=tmp_path, model=tmp_path, book=None)
    assert (FAULT in seen) is not baseline
    assert "kvconform.live.served" in seen["command"]


@pytest.mark.parametrize(
    "name", [n for n, d in load_defects(load_spec()).items() if d.live and d.engine_fault]
)
def test_the_targets_of_live_faults_exist(name: str) -> None:
    fault = load_defects(load_spec())[name].fault()
    assert fault is not None
    for target, _ in fault.changes:
        owner, attribute = target.resolve()
        assert callable(getattr(owner, attribute))
