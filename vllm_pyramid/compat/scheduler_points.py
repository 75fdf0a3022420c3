# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's schedulers let another one have a word, under public names.

Target: `Scheduler._reserve_prefill_lookahead`, `._get_local_prefix_cache_hit` (vLLM 0.33 has one
argument more), `._free_request`, `.make_spec_decoding_stats` (which is told of every verified
draft), and `.grammar_compile_error_reqs`: a set of ids in vLLM 0.32, a
dictionary of errors in 0.33. Why: the last word on the size of a chunk and on whether a request
starts at all; the prefix that a request may share, which its plan says; the report of a request; an
exception in the scheduler would end the engine. Remove when schedulers have hooks for these.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request


class SchedulerPoints(Scheduler):
    """Mixed into vLLM's schedulers; ours override the methods with public names."""

    def next_chunk(self, request: Request, computed: int, tokens: int) -> int:
        """Tokens of a request's next chunk.

        Args:
            computed: tokens of the request. tokens: that vLLM would schedule, 0 if none.
        """
        return self.stock_chunk(request, computed, tokens)

    def stock_chunk(self, request: Request, computed: int, tokens: int) -> int:
        """vLLM's own answer."""
        chunk: int = super()._reserve_prefill_lookahead(request, computed, tokens)
        return chunk

    def cached_prefix(self, request: Request, most: int) -> tuple[KVCacheBlocks, int]:
        """What is in the cache of a request that has no blocks, and how many tokens that is: none.

        Args:
            most: tokens that it may be; the last one is computed in any case.

        Returns:
            The blocks, which `KVCacheManager.allocate_slots` is given, and the tokens.
        """
        return self.kv_cache_manager.empty_kv_cache_blocks, 0

    def report_of(self, request: Request) -> dict[str, Any]:
        """What a request's response says, as `kv_transfer_params`: all that vLLM passes on.

        Called when the request has ended and still holds its blocks.
        """
        return {}

    def ends(self, request: Request) -> None:
        """The request has ended and is about to give its blocks back."""

    def freed(self, request: Request) -> None:
        """The request has ended and its blocks are gone."""

    def verified(self, accepted: int) -> None:
        """Of the drafts of a request in a step so many were accepted."""

    def make_spec_decoding_stats(
        self, stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        self.verified(num_accepted_tokens)
        return super().make_spec_decoding_stats(
            stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs
        )

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        return self.next_chunk(request, num_computed_tokens, num_new_tokens)

    def _get_local_prefix_cache_hit(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        most = request.num_tokens - 1
        if max_cache_hit_length is not None:
            most = min(most, max_cache_hit_length)
        blocks, tokens = self.cached_prefix(request, most)
        return blocks, tokens, 0, False

    def _free_request(
        self, request: Request, delay_free_blocks: bool = False
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        report = self.report_of(request)
        self.ends(request)
        kv_transfer_params, ec_transfer_params = super()._free_request(request, delay_free_blocks)
        self.freed(request)
        return kv_transfer_params or report, ec_transfer_params

    def end_with_error(self, request_id: str, reason: str) -> None:
        """Let a request end with an error in the next step; from 0.33 on with its reason."""
        failed: Any = self.grammar_compile_error_reqs
        if isinstance(failed, set):
            failed.add(request_id)
            return
        from vllm.outputs import RequestError

        failed[request_id] = RequestError(code="validation_error", message=reason)
