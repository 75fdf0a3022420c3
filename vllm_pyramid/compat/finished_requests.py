# SPDX-License-Identifier: Apache-2.0
"""Show finished requests to the front end, and let it ask whether an engine is idle.

A note of a request follows the engine's own id, never the client's, which two requests may share:
it is kept by object until vLLM has given the id, and then with the state that ends with the
request.
"""

from __future__ import annotations

from collections import OrderedDict
from copy import copy
from typing import Any, NamedTuple, Protocol

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.serial_utils import MsgpackEncoder

from vllm_pyramid.compat.wrap import wrap

_NOTE = "vllm_pyramid_note"
# Requests that are noted and have not reached the engine; more of them were never sent.
_MAX_UNSENT = 1024


class FinishedRequest(NamedTuple):
    """A request that the engine has finished.

    Attributes:
        prompt, answer: ids of tokens.
        logprob: the sum over the answer; None if the client did not ask for log probabilities.
        report: what the scheduler reports of it.
    """

    prompt: list[int]
    answer: list[int]
    logprob: float | None
    report: dict[str, Any]


class Observer(Protocol):
    """What is told of noted requests that end."""

    def on_finishing(self, note: Any, report: dict[str, Any]) -> None:
        """Add to a report before the client gets it."""

    def on_finished(self, note: Any, finished: FinishedRequest) -> None:
        """Take a request that has ended."""


# What this process tells; None before the first observer.
_observer: Observer | None = None
# Notes of requests without an id of the engine, by object, which is kept so that no other one takes
# its place; and of those with an id that the front end's state does not have yet.
_unnamed: OrderedDict[int, tuple[Any, Any]] = OrderedDict()
_unsent: OrderedDict[str, Any] = OrderedDict()


def note(request: EngineCoreRequest, value: Any) -> None:
    """Tell the observer `value` when the request ends; None: do not tell of it."""
    if value is None:
        _unnamed.pop(id(request), None)
        return
    _unnamed[id(request)] = request, value
    if len(_unnamed) > _MAX_UNSENT:
        _unnamed.popitem(last=False)


def install(observer: Observer) -> None:
    """Tell `observer`, from now on alone, of noted requests that end with a report."""
    global _observer
    _observer = observer
    wrap(InputProcessor, "assign_request_id", _assign_and_note)
    wrap(OutputProcessor, "add_request", _add_noted_request)
    wrap(OutputProcessor, "process_outputs", _process_outputs_and_show)


def _check_values(request: EngineCoreRequest) -> None:
    """Raise VLLMValidationError for a value that a message to the engine cannot have.

    vLLM finds it when it has kept a state of the request already, which then stays: the engine
    would never be idle again.
    """
    sent = copy(request)
    sent.prompt_token_ids = sent.prompt_embeds = sent.mm_features = None  # long, and vLLM's own
    try:
        MsgpackEncoder().encode(sent)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise VLLMValidationError(
            f"the request has a value that cannot be sent to the engine: {error}"
        ) from None


def _assign_and_note(assign_request_id: Any, request: EngineCoreRequest) -> None:
    _, value = _unnamed.pop(id(request), (None, None))
    _check_values(request)
    assign_request_id(request)
    _unsent.pop(request.request_id, None)
    if value is not None:
        _unsent[request.request_id] = value
        if len(_unsent) > _MAX_UNSENT:
            _unsent.popitem(last=False)


def _add_noted_request(
    add_request: Any,
    self: OutputProcessor,
    request: EngineCoreRequest,
    prompt: str | None,
    parent_req: Any = None,
    request_index: int = 0,
    *args: Any,
    **kw: Any,
) -> None:
    add_request(self, request, prompt, parent_req, request_index, *args, **kw)
    own = request.request_id if parent_req is None else parent_req.request_id
    if (value := _unsent.get(own)) is None:
        return
    setattr(self.request_states[request.request_id], _NOTE, value)
    if parent_req is None or request_index == parent_req.sampling_params.n - 1:
        del _unsent[own]


def _process_outputs_and_show(
    process_outputs: Any,
    self: OutputProcessor,
    engine_core_outputs: list[EngineCoreOutput],
    *args: Any,
    **kw: Any,
) -> Any:
    told, ended = _observer, []
    assert told is not None
    for output in engine_core_outputs:
        report = output.kv_transfer_params
        if output.finish_reason is None or not isinstance(report, dict):
            continue
        state = self.request_states.get(output.request_id)
        if (value := getattr(state, _NOTE, None)) is not None:
            told.on_finishing(value, report)
            ended.append((state, value, dict(report)))
    result = process_outputs(self, engine_core_outputs, *args, **kw)
    for state, value, report in ended:
        assert state is not None
        if state.detokenizer is None or state.prompt_token_ids is None:
            continue
        logprobs = state.logprobs_processor
        finished = FinishedRequest(
            list(state.prompt_token_ids),
            list(state.detokenizer.output_token_ids),
            None if logprobs is None else logprobs.cumulative_logprob,
            report,
        )
        told.on_finished(value, finished)
    return result


def is_idle(engine_client: Any) -> bool:
    """Return whether no request of a front end waits or runs."""
    return not engine_client.output_processor.request_states
