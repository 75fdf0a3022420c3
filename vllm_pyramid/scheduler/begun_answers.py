# SPDX-License-Identifier: Apache-2.0
"""Answers of which another engine has sampled the first tokens: no step here samples these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import Request


class BegunAnswers:
    """The answers of one scheduler whose first tokens no front end has got yet."""

    def __init__(self) -> None:
        self._tokens: dict[str, list[int]] = {}
        self._ended: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def add(self, request: Request, tokens: Sequence[int]) -> None:
        """Let a request that has not started continue behind `tokens`, as a preempted one does."""
        if tokens and not request.num_output_tokens:
            request.append_output_token_ids(list(tokens))
            self._tokens[request.request_id] = list(tokens)

    def tell(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        """Tell the workers all tokens of the requests that start; vLLM's V1 names the prompt's."""
        for new in output.scheduled_new_reqs:
            if new.req_id in self._tokens and new.prefill_token_ids is None:
                new.prefill_token_ids = list(requests[new.req_id].all_token_ids)

    def put_in_front(self, outputs: Mapping[int, Any]) -> None:
        """Put the tokens in front of the first that a step has sampled, in outputs by front end.

        They have an output of their own: a stop string in them ends the answer there.
        """
        for of_client in outputs.values():
            found: list[EngineCoreOutput] = []
            for output in of_client.outputs:
                # Without a token it ends with an error.
                if output.request_id in self._tokens and output.new_token_ids:
                    first = EngineCoreOutput(
                        output.request_id,
                        self._tokens.pop(output.request_id),
                        events=output.events,
                        prefill_stats=output.prefill_stats,
                        trace_headers=output.trace_headers,
                    )
                    output.events = output.prefill_stats = None
                    found.append(first)
                found.append(output)
            of_client.outputs = found
        for request_id in self._ended:
            self._tokens.pop(request_id, None)
        self._ended.clear()

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended, once the step's outputs are made, which may be its."""
        if request_id in self._tokens:
            self._ended.append(request_id)
