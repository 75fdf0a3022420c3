# SPDX-License-Identifier: Apache-2.0
"""Notes of requests follow the engine's ids, in vLLM's own front end: clients' ids may be equal."""

from __future__ import annotations

from copy import copy
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.serial_utils import MsgpackEncoder

from tests.frontend.test_shadow import BAD, CODE, MAIL, send, shadow
from vllm_pyramid.compat import finished_requests
from vllm_pyramid.frontend.shadow import Shadow
from vllm_pyramid.frontend.shadow_judge import MIN_COMPARISONS


class FrontEnd:
    """vLLM's own front end of an engine: it names requests and takes the engine's outputs."""

    def __init__(self) -> None:
        self.output = OutputProcessor(None, log_stats=False)

    def send(self, known: Shadow, client_id: str, application: str, n: int = 1) -> list[str]:
        """Pass a request through; return the engine's names of it and of its copies."""
        settings: dict[str, Any] = {"n": n, "temperature": 1.0} if n > 1 else {"temperature": 0}
        params = SamplingParams(
            max_tokens=8,
            extra_args={"kv_application": application},
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **settings,
        )
        one = EngineCoreRequest(client_id, [1] * 400, None, params, None, 0.0, None, None, None)
        send(known, one)
        InputProcessor.assign_request_id(one)
        if n == 1:
            self.output.add_request(one, None)
            return [one.request_id]
        parent, names = ParentRequest(one), []
        for index in range(n):
            child = one if index == n - 1 else copy(one)
            child.request_id, child.sampling_params = parent.get_child_info(index)
            self.output.add_request(child, None, parent, index)
            names.append(child.request_id)
        return names

    def end(self, name: str) -> dict[str, Any]:
        """End a request after two tokens; return its report as the client gets it."""
        report = {"evicted_tokens": 5}
        ended = EngineCoreOutput(
            name, [2, 3], finish_reason=FinishReason.LENGTH, kv_transfer_params=report
        )
        self.output.process_outputs([ended])
        return report


def test_two_requests_of_one_client_id_count_for_their_own_applications(monkeypatch) -> None:
    known, _ = shadow()
    finished_requests.install(known)
    queued: list[tuple[Any, Any]] = []
    monkeypatch.setattr(known, "on_finished", lambda note, found: queued.append((note, found)))
    front = FrontEnd()
    (mail,) = front.send(known, "same", "mail")
    (code,) = front.send(known, "same", "code")
    front.end(mail)
    front.end(code)
    assert [note for note, _ in queued] == [MAIL, CODE]
    # One that is not sampled says nothing, whatever came before under its name.
    front.send(known, "same", "mail")
    known.judge._share = 0.0
    (other,) = front.send(known, "same", "code")
    front.end(other)
    assert len(queued) == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sampling_params", SamplingParams(top_k=2**64)),
        ("sampling_params", SamplingParams(extra_args={"other": "\ud800"})),
        ("reasoning_parser_kwargs", {"chat_template_kwargs": {"deep": [-(2**70)]}}),
        ("priority", 2**64),
    ],
)
def test_a_request_that_cannot_be_sent_is_refused_before_vllm_keeps_its_state(
    field: str, value: Any
) -> None:
    """Such a state would stay, and no answer be compared again."""
    known, _ = shadow()
    finished_requests.install(known)
    params = SamplingParams(temperature=0, max_tokens=8)
    one = EngineCoreRequest("a", [1] * 400, None, params, None, 0.0, None, None, None)
    finished_requests.note(one, MAIL)
    setattr(one, field, value)
    with pytest.raises((OverflowError, UnicodeEncodeError)):
        MsgpackEncoder().encode(one)
    with pytest.raises(VLLMValidationError, match=r"cannot be sent to the engine: .*(ints|codec)"):
        InputProcessor.assign_request_id(one)
    assert one.request_id not in finished_requests._unsent
    assert id(one) not in finished_requests._unnamed


def test_every_copy_says_that_it_ran_with_the_whole_cache_and_no_other_request_does() -> None:
    known, _ = shadow()
    finished_requests.install(known)
    for _ in range(MIN_COMPARISONS):
        known.judge.add(MAIL, BAD, evicted=True)
    finished_requests._unnamed.clear()
    front = FrontEnd()
    names = front.send(known, "same", "mail", n=3)
    known.judge._share = 0.0
    (code,) = front.send(known, "same", "code")
    assert "kv_shadow" not in front.end(code)
    assert [front.end(name).get("kv_shadow") for name in names] == ["full"] * 3
    assert not finished_requests._unsent and not finished_requests._unnamed
