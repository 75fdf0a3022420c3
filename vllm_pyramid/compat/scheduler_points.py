# SPDX-License-Identifier: Apache-2.0
"""Give the extension points of vLLM's scheduler public names."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingStats


class SchedulerPoints(Scheduler):
    """Mixed into vLLM's schedulers; ours override the methods with public names."""

    _reasons: dict[str, str] | None = None

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self.connector is not None:
            self._requeue_failed_loads()
        return super().schedule(*args, **kwargs)

    def _requeue_failed_loads(self) -> None:
        """Move requests whose load has failed to the front of the queue of new requests.

        vLLM leaves them among those that hold blocks. Where the first of these finds no room, it
        looks at no other, although the blocks of the others may be what is missing: a whole prompt
        takes more of them than its state did.
        """
        holding = self.kv_holding_waiting
        if failed := [request for request in holding if not self._holds_kv_blocks(request)]:
            holding.remove_requests(failed)
            for request in reversed(failed):
                self.waiting.prepend_request(request)

    def next_chunk(self, request: Request, computed: int, tokens: int) -> int:
        """Return the tokens of a request's next chunk, where vLLM would schedule `tokens`."""
        return self.stock_chunk(request, computed, tokens)

    def stock_chunk(self, request: Request, computed: int, tokens: int) -> int:
        """Return vLLM's own answer to `next_chunk`."""
        chunk: int = super()._reserve_prefill_lookahead(request, computed, tokens)
        return chunk

    def cached_prefix(self, request: Request, limit: int) -> tuple[KVCacheBlocks, int]:
        """Return the cached blocks that a new request can share, and their tokens; by default none.

        It may share `limit` tokens at most; the last one is always computed.
        """
        return self.kv_cache_manager.empty_kv_cache_blocks, 0

    def report_of(self, request: Request) -> dict[str, Any]:
        """Return the report in a request's response, which travels as `kv_transfer_params`.

        Called when the request has ended and still holds its blocks.
        """
        return {}

    def ends(self, request: Request) -> None:
        """Called before an ended request's blocks are freed, unless a connector loads into them."""

    def freed(self, request: Request) -> None:
        """Called when a request has ended, after its blocks are freed."""

    def verified(self, accepted: int) -> None:
        """Called with the number of accepted drafts of a request in a step."""

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> SpecDecodingStats | None:
        self.verified(num_accepted_tokens)
        return super().make_spec_decoding_stats(
            spec_decoding_stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs
        )

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        return self.next_chunk(request, num_computed_tokens, num_new_tokens)

    def _get_local_prefix_cache_hit(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        limit = request.num_tokens - 1
        if max_cache_hit_length is not None:
            limit = min(limit, max_cache_hit_length)
        blocks, tokens = self.cached_prefix(request, limit)
        return blocks, tokens, 0, False

    def _free_request(
        self, request: Request, delay_free_blocks: bool = False
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        report = self.report_of(request)
        if not delay_free_blocks:  # else a connector still loads what it holds
            self.ends(request)
        kv_transfer_params, ec_transfer_params = super()._free_request(request, delay_free_blocks)
        self.freed(request)
        return {**report, **(kv_transfer_params or {})}, ec_transfer_params

    def end_with_error(self, request_id: str, reason: str, code: str = "validation_error") -> None:
        """End a request with an error, at the end of the step whose output comes next.

        What that step has sampled for it is dropped. From vLLM 0.33 on the client's status is 400
        with the default code and 500 with another; in 0.32 it is 500.
        """
        failed: Any = self.grammar_compile_error_reqs
        if isinstance(failed, set):
            failed.add(request_id)
            self._reasons = {**(self._reasons or {}), request_id: reason}
            return
        from vllm.outputs import RequestError

        failed[request_id] = RequestError(code=code, message=reason)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        for request_id in self.grammar_compile_error_reqs:  # a step may have run meanwhile
            drop_tokens(model_runner_output, request_id)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._reasons:
            for of_client in outputs.values():
                for output in of_client.outputs:
                    if output.finish_reason == FinishReason.ERROR:
                        output.stop_reason = self._reasons.get(output.request_id)
            self._reasons = None
        return outputs


def connector_hooks(connector: Any) -> list[Any]:
    """Return the scheduler's hooks that a KV connector brings (`step.hooks.SchedulerHooks`)."""
    return list(getattr(connector, "scheduler_hooks", ()))


def drop_tokens(output: ModelRunnerOutput, request_id: str) -> None:
    """Remove what a step has sampled for a request: its last token could end it as a success."""
    index = output.req_id_to_index.get(request_id)
    if index is not None and output.sampled_token_ids:
        output.sampled_token_ids[index] = []
