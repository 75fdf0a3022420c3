# SPDX-License-Identifier: Apache-2.0
"""V in host memory (KCache, arXiv:2404.18057): the device holds K alone, and reads the best V.

    device page b  [ K of 2 N tokens ]    host page b  [ V of the same 2 N tokens ]

Both pools are addressed by one block table, so V needs no accounting of its own: host page b is in
use exactly while device page b belongs to a layer without V on the device. What is evicted is
decided as without it.

    vllm serve MODEL --kv-policy kcache --kv-swap-space 8
    vllm serve MODEL --kv-policy pyramidkv --kv-policy-args '{"values": "host"}'

- **Answers.** With `top_n` at least the context the output is that of `full`, bit for bit. The
  paper's weights do not sum to 1, which makes a layer's output too small where attention is wide:
  lab/results/quality.md#v-in-host-memory. Use `{"renormalize": false}` for models with learned
  sinks, whose share of the softmax is meant to be missing.
- **Device memory.** A block without V has twice the tokens, so that all blocks have one size. Of m
  layers, L of them on the device, a request takes (m + L) / 2m of the blocks of `full`.
- **Host memory.** `--kv-swap-space GiB` is the most that each worker takes; by default it is as
  much as the device's KV cache. A smaller host pool makes the device's pool as small. Too little
  for one request of `--max-model-len` is refused with the numbers.
- **A request** may set `kv_top_n`. A response has `v_bytes_written`, `v_bytes_read` and
  `v_bytes_read_per_token`: N x query heads x head size x bytes of an element x swapped layers.
- **On CUDA** V lies in pinned memory and CUDA graphs are `PIECEWISE`; `FULL` and
  `FULL_DECODE_ONLY` are refused. Buffers are taken out of the cache's memory: twice V of
  `--max-model-len` and of `--max-num-batched-tokens` tokens in one layer, and 128 MiB. It ran once
  (docs/gpu.md); the time of fetching rows was not measured. It is for room, not for speed: the
  device holds nearly twice the tokens, and a step takes longer than one with V on the device
  unless contexts are long (Llama 3 8B: some 34,000 tokens, counted in docs/design.md). On the CPU
  both pools are host memory, so it serves to measure quality.
- **Not with** policies that evict during generation, accumulate scores or thin prompts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from vllm_pyramid.policy.capabilities import Feature, Unsupported
from vllm_pyramid.policy.values import Values

if TYPE_CHECKING:
    from vllm_pyramid.policy.policy import Policy
    from vllm_pyramid.step.hooks import SchedulerHooks, WorkerContext, WorkerHooks

TOP_N_KEY = "kv_top_n"  # of requests


class HostValues(Values):
    """KCache: keep V in host memory, and read it for the keys with the largest attention alone.

    The device keeps K alone in the layers from `device_layers` on.

    Attributes:
        top_n: keys of which a query head of a generated token reads V: those with the largest
            attention. Prompts attend to everything, and so do queries that see no more keys.
        device_layers: number of the lowest layers, which keep V on the device: the paper's L.
        renormalize: make the weights of these keys sum to 1. The paper does not (section 3.1):
            there they are those of the softmax over all keys.
    """

    kind: Literal["host"] = "host"
    top_n: int = Field(default=128, ge=1, lt=2**31)
    device_layers: int = Field(default=1, ge=0)
    renormalize: bool = True

    uses_swap_space: ClassVar[bool] = True
    attends: ClassVar[bool] = True
    # Keys are chosen behind the prompt, and no step has queries of both kinds.
    splits_at_prompt_end: ClassVar[bool] = True
    copies_blocks: ClassVar[bool] = False

    def on_device(self, layer: int) -> bool:
        return layer < self.device_layers

    @property
    def unsupported(self) -> Unsupported:
        return {
            Feature.DRAFTS: "it fetches what one token attends to, and drafts are several",
            Feature.KV_TURNS: (
                "V lies in host memory, which copies of the device's blocks do not include"
            ),
        }

    def check(self, policy: Policy) -> None:
        if any(part.works_during_prompt for part in policy.parts):
            raise ValueError(
                f"policy {policy.name!r} keeps V in host memory (values: host), which goes with "
                "evictions at the prompt's end alone so far, by scores made there: its schedule is "
                f"{policy.schedule.kind!r}, its scorer {policy.scorer.kind!r}, and chunk.tokens "
                f"{policy.chunk.tokens}"
            )

    def check_layers(self, num_layers: int) -> None:
        if self.device_layers >= num_layers:
            raise ValueError(
                f"values: host keeps V of {self.device_layers} layers on the device, and the model "
                f"has {num_layers}: nothing would be in host memory; lower `device_layers`"
            )

    def for_request(self, keys: dict[str, Any]) -> HostValues:
        top_n = keys.pop(TOP_N_KEY, None)
        return self if top_n is None else self.model_copy(update={"top_n": top_n})

    def worker_hooks(self, policy: Policy, context: WorkerContext) -> WorkerHooks | None:
        from vllm_pyramid.methods.host_values.worker import FetchedValueCache, HostValueCache

        if context.copies is None:
            return HostValueCache(policy, self, context)
        return FetchedValueCache(policy, self, context)

    def scheduler_hooks(self, policy: Policy, num_layers: int) -> SchedulerHooks | None:
        from vllm_pyramid.methods.host_values.traffic import SwapTraffic

        return SwapTraffic()
