# SPDX-License-Identifier: Apache-2.0
"""Plain Transformers generation, and kvpress's presses: the peers outside of vLLM.

Run as a file, `PYTHON -P peer.py`. kvpress needs another Transformers than vLLM, and so its own
environment, which does not have this package. The file therefore imports nothing of ours. It has
the protocol of `vllm_pyramid/tools/child_process.py` and the tasks of `engine.py`.

Requests are decoded greedily in batches as in kvpress: the press compresses the prompts,
and new tokens have their true positions.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

MARK = "@vllm-pyramid "


def say(**message: Any) -> None:
    print(f"\n{MARK}{json.dumps(message)}", flush=True)


class Peer:
    """A model and the requests that decode.

    Args:
        model: folder or name. random: make weights up, from the configuration alone.
        press: one of kvpress's classes, or None.
    """

    def __init__(self, model: str, dtype: str, random: bool, press: str | None) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.press = press
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cpu":
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
        if press is not None:
            import kvpress

            self.press_class = getattr(kvpress, press)
        kind = getattr(torch, dtype)
        torch.manual_seed(0)
        if random:
            config = AutoConfig.from_pretrained(model)
            made = AutoModelForCausalLM.from_config(config, dtype=kind, attn_implementation="sdpa")
        else:
            made = AutoModelForCausalLM.from_pretrained(
                model, dtype=kind, attn_implementation="sdpa"
            )
        self.model = made.to(self.device).eval()
        self.layers = made.config.num_hidden_layers
        self.cache: Any = None
        self.last: Any = None
        self.position = 0

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]], keep: int | None) -> None:
        """The prompts of a batch, all at once; `keep` tokens of each stay."""
        from transformers import DynamicCache

        self.cache = DynamicCache()
        ids = torch.tensor(prompts, device=self.device)
        self.position = ids.shape[1]
        if keep is None:
            output = self.model(input_ids=ids, past_key_values=self.cache, logits_to_keep=1)
        else:
            # Presses truncate `prompt * (1 - ratio)`; half a token keeps rounding errors out.
            share = (keep + (0.0 if self.press == "PyramidKVPress" else 0.5)) / self.position
            with self.press_class(compression_ratio=1 - share)(self.model):
                output = self.model(input_ids=ids, past_key_values=self.cache, logits_to_keep=1)
            held = sum(layer.keys.shape[2] for layer in self.cache.layers) / self.layers
            if abs(held - keep) > 1 + keep // 50:
                raise RuntimeError(f"the press kept {held:.0f} tokens a layer, not {keep}")
        self.last = output.logits[:, -1].argmax(-1, keepdim=True)
        self._wait()

    @torch.inference_mode()
    def step(self) -> None:
        """The next token of every request of the batch."""
        places = torch.full_like(self.last, self.position)
        output = self.model(
            input_ids=self.last, past_key_values=self.cache, position_ids=places, logits_to_keep=1
        )
        self.last = output.logits[:, -1].argmax(-1, keepdim=True)
        self.position += 1
        self._wait()

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def run(
        self, prompts: list[list[int]], max_tokens: int, keep: int | None, batch: int
    ) -> dict[str, Any]:
        """A whole job, in batches; the times of requests and of prefill and decode.

        The decode rate is that of full batches: a last one with fewer requests is what draining is
        to an engine, whose rate leaves that out too.
        """
        timings, prefills, decodes, tokens = [], 0.0, 0.0, 0
        full = min(batch, len(prompts))
        begin = time.perf_counter()
        for first in range(0, len(prompts), batch):
            part = prompts[first : first + batch]
            start = time.perf_counter()
            self.prefill(part, keep)
            prefilled = time.perf_counter()
            for _ in range(max_tokens - 1):
                self.step()
            end = time.perf_counter()
            prefills += prefilled - start
            if len(part) == full:
                decodes += end - prefilled
                tokens += full * (max_tokens - 1)
            timings += [[prefilled - begin, end - begin, max_tokens]] * len(part)
            say(progress=len(part))
        self.cache = None
        return {
            "seconds": time.perf_counter() - begin,
            "prefill_seconds": prefills,
            "decode_tokens_per_s": tokens / decodes,
            "batch": full,
            "timings": timings,
        }

    def fill(self, prompts: list[list[int]], keep: int | None, batch: int) -> dict[str, Any]:
        """A batch that is then to decode."""
        self.prefill(prompts[:batch], keep)
        return {"resident_max": min(batch, len(prompts))}

    def steps(self, count: int) -> dict[str, Any]:
        """`count` decode steps of the batch."""
        seconds = []
        for _ in range(count):
            begin = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - begin)
        return {"seconds": seconds, "batch": self.last.shape[0]}

    def clear(self) -> None:
        """End the batch."""
        self.cache = self.last = None


def main() -> None:
    peer: Peer | None = None
    for line in iter(sys.stdin.readline, ""):
        task = json.loads(line)
        do = task.pop("do")
        if do == "start":
            peer = Peer(**task)
            say(done={"layers": peer.layers})
            continue
        assert peer is not None
        say(done=getattr(peer, do)(**task))


if __name__ == "__main__":
    main()
