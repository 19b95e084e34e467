# SPDX-License-Identifier: Apache-2.0
"""Entry point of a fresh interpreter that makes one run: `python -m kvconform.run.child FOLDER`.

kvconform.run.isolation starts it, or has it forked (kvconform.session.reseeded).
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
from pathlib import Path

from kvconform.files import replace
from kvconform.process import watchdog
from kvconform.process.supervisor import dies_with_parent


def main(folder: Path) -> None:
    """Make the run that `job.json` in `folder` describes, and write it to the file `answer`.

    Of a first part: what the second one needs. Ends the process at once, even if threads of the
    connector are left.
    """
    dies_with_parent()
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    # The parent's path, which has the connector's package, comes first.
    sys.path[:] = [*job["path"], *(each for each in sys.path if each not in job["path"])]
    if "hash_seed" in job:  # vLLM seeds its block hashes with it; Python's own hashes are seeded
        os.environ["PYTHONHASHSEED"] = job["hash_seed"]
    gc.disable()  # it would take a seventh of the time of the imports, and find nothing
    from kvconform.compat.vllm_api import init_none_hash, sha256
    from kvconform.config.target import Target
    from kvconform.contract.case import Case, Variant
    from kvconform.run.calibration import promises_of
    from kvconform.run.isolation import FirstPart, FirstPartEnded
    from kvconform.run.runner import run_variant

    gc.enable()
    init_none_hash(sha256)  # in a forked process, the one before has imported it, with another seed
    variant = Variant(Case.model_validate(job["case"], strict=False), **job["axes"])
    target = Target(**job["target"])
    tmp = Path(job["tmp"])
    promises = None
    if job["declared"] is not None:
        calibration = tmp / "calibration"
        promises = promises_of(target, calibration, job["caps"], declared=job["declared"])
    part = FirstPart() if job["first_part"] else None
    watchdog.start(job["limit"], folder / "note")
    run = run_variant(
        variant,
        target,
        seed=job["seed"],
        tmp=tmp,
        relation=job["relation"],
        caps=job["caps"],
        promises=promises,
        may_fork=True,
        first_part=part,
        rests=job["rests"],
    )
    watchdog.stop()
    if part is None:
        answer = json.dumps(run.to_dict()).encode()
    else:
        step = max(event["step"] for event in run.trace)
        ended = FirstPartEnded(run.harness_error, run.lacks)
        answer = pickle.dumps((run.trace, step, ended, part))
    replace(folder / "answer", answer)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
