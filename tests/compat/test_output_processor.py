# SPDX-License-Identifier: Apache-2.0
"""The reason for which a request failed reaches the client, by vLLM's own classes."""

from __future__ import annotations

import asyncio

import pytest
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GenerationError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from vllm_pyramid.compat import output_processor

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(
        output_processor.vllm_sends_reasons(), reason="this vLLM sends reasons itself"
    ),
]


def _collector(processor: OutputProcessor, name: str) -> RequestOutputCollector:
    params = SamplingParams(max_tokens=4, detokenize=False)
    request = EngineCoreRequest(name, [5, 6], None, params, None, 0.0, None, None, None)
    request.external_req_id = name
    queue = RequestOutputCollector(RequestOutputKind.DELTA, name)
    processor.add_request(request, None, queue=queue)
    return queue


def test_the_waiting_server_gets_the_reason_and_others_their_tokens() -> None:
    output_processor.install()
    output_processor.install()  # the second time changes nothing
    processor = OutputProcessor(None, log_stats=False)
    wrong, right, stopped = (_collector(processor, name) for name in ("wrong", "right", "stopped"))
    processor.process_outputs([EngineCoreOutput("wrong", [7])])  # not read before the error
    processor.process_outputs(
        [
            EngineCoreOutput(
                "wrong", [], finish_reason=FinishReason.ERROR, stop_reason="KV policy: NaN"
            ),
            EngineCoreOutput("right", [8]),
            EngineCoreOutput("stopped", [9], finish_reason=FinishReason.STOP, stop_reason="x"),
        ]
    )
    with pytest.raises(GenerationError, match="KV policy: NaN") as error:
        asyncio.run(wrong.get())
    answer = create_error_response(error.value).error
    assert (answer.code, answer.message) == (500, "KV policy: NaN")
    assert answer.type == "Internal Server Error"
    assert asyncio.run(right.get()).outputs[0].token_ids == [8]  # type: ignore[union-attr]
    last = asyncio.run(stopped.get())
    assert last.finished and last.outputs[0].stop_reason == "x"  # type: ignore[union-attr]
    assert not processor.has_request("wrong")
