# SPDX-License-Identifier: Apache-2.0
"""The complete vLLM in a separate process with a connector of refimpl, a few prompts run twice.

`python live_rig.py CLASS MODULE DIR...`

vLLM is imported once. Every connector gets a fork, and a folder DIR for its trace.
"""

from __future__ import annotations

import atexit
import os
import random
import signal
import sys
import traceback
from pathlib import Path

SIZE, SECONDS = 32, 40
LENGTHS = (70, 96, 20, 130)
BLOCKS, BUDGET, SEQUENCES, OUTPUTS = 13, 64, 4, 6
"""Too few blocks for all prompts with their answers at once."""


def generate(cls: str, module: str, folder: Path, model: Path) -> None:
    """Send prompts, reset the local cache, and send them again; by then the connector has them."""
    from vllm import LLM, SamplingParams

    transfer = {
        "kv_connector": cls,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"load": "async"} if "Received" in cls else {},
    }
    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        seed=0,
        block_size=SIZE,
        max_model_len=320,
        num_gpu_blocks_override=BLOCKS,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=SEQUENCES,
        kv_transfer_config=transfer,
        disable_log_stats=False,
        disable_hybrid_kv_cache_manager=True,
    )
    draw = random.Random(1)
    prompts = [
        {"prompt_token_ids": [draw.randrange(10, 500) for _ in range(length)]} for length in LENGTHS
    ]
    for _ in range(2):
        llm.generate(
            prompts,
            SamplingParams(temperature=0.0, max_tokens=OUTPUTS, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        llm.reset_prefix_cache()
    llm.llm_engine.engine_core.shutdown()


def main(arguments: list[str]) -> None:
    """One fork after the other."""
    import torch
    import vllm  # noqa: F401

    from kvconform.fixtures.tiny_llama import make

    torch.set_num_threads(1)
    import kvconform.live.probe  # noqa: F401

    while arguments:
        cls, module, path, *arguments = arguments
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        model = make(folder.parent / "model")
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        signal.alarm(SECONDS)
        os.environ["KVCONFORM_LIVE_TRACE"] = str(folder)
        try:
            generate(cls, module, folder, model)
        except BaseException:
            (folder / "error").write_text(traceback.format_exc())
        atexit._run_exitfuncs()
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
