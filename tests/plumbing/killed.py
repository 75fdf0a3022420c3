# SPDX-License-Identifier: Apache-2.0
"""Two lives of an engine with a folder for its host cache; the first ends by kill -9.

    python tests/plumbing/killed.py REQUEST.json first|second

`REQUEST` holds `llm` (arguments of `vllm.LLM`, without the folder), `folder`, and `said` (the words
of two turns, token ids). The first life says both turns, writes what came of them to
`REQUEST.first`, and kills its process group once the first turn's files have been written. The
second one, with the answer of the first turn, goes on with the second turn.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

ANSWER, PATIENCE = 40, 120.0


def say(llm: Any, tokens: list[int], turns: list[int]) -> dict[str, Any]:
    """Return what came of one turn."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0,
        max_tokens=ANSWER,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_turns": turns},
    )
    (output,) = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
    return {
        "prompt": tokens,
        "token_ids": list(output.outputs[0].token_ids),
        "cached": output.num_cached_tokens,
    }


def wait_for_files(folder: Path) -> None:
    """Wait until files were written, and no more are for a second."""
    end, before, since = time.monotonic() + PATIENCE, -1, time.monotonic()
    while time.monotonic() < end:
        count = sum(1 for _ in folder.rglob("*.kv"))
        if count != before or not count:
            before, since = count, time.monotonic()
        elif time.monotonic() - since > 1:
            return
        time.sleep(0.05)
    raise TimeoutError("no files were written")


def main(request: Path, life: str) -> None:
    """Run one life."""
    from vllm import LLM

    given = json.loads(request.read_text())
    folder = Path(given["folder"])
    own = {**given["llm"]["additional_config"], "kv_host_cache_dir": str(folder)}
    llm = LLM(**{**given["llm"], "additional_config": own})
    first, more = given["said"]
    result = request.with_suffix(f".{life}")
    if life == "second":
        earlier = json.loads(request.with_suffix(".first").read_text())["turns"]
        result.write_text(json.dumps({"turns": [say(llm, earlier[1]["prompt"], [len(first)])]}))
        return
    turns = [say(llm, first, [])]
    wait_for_files(folder)
    turns.append(say(llm, [*first, *turns[0]["token_ids"], *more], [len(first)]))
    result.write_text(json.dumps({"turns": turns}))
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
