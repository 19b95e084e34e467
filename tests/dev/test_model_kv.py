# SPDX-License-Identifier: Apache-2.0
"""Tests of the measurement of codecs on a model's KV."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvconform.dev.model_kv import DTYPE, kv_of, main, measure
from kvconform.fixtures.tiny_llama import make
from kvconform.refimpl.cache import codecs

pytest.importorskip("transformers")
TOKENS = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model") / "tiny")


def test_the_kv_of_a_model_is_within_the_tolerances(model: Path) -> None:
    layers = kv_of(model, None, TOKENS)
    assert [(layer.dtype, len(layer)) for layer in layers] == [(DTYPE, TOKENS)] * 2
    assert not torch.equal(layers[0], layers[1])
    found = measure(layers, 32)
    assert {"int8", "int4"} <= set(found)
    for one in found.values():
        assert 0 < one.largest <= one.codec.tolerance
    assert found["int8"].largest < found["int4"].largest
    assert 1 < found["int8"].smaller < 2 < found["int4"].smaller < 4


def test_a_codec_that_loses_more_than_it_declares_is_a_failure(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(model), "--tokens", str(TOKENS), "--chunk", "32"]
    assert main(arguments) == 0
    monkeypatch.setitem(codecs.CODECS, "int8", codecs.Quantising(4, 0.01))
    assert main(arguments) == 1
    assert "codec int8 loses more than it declares" in capsys.readouterr().err
