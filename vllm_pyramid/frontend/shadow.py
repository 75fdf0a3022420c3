# SPDX-License-Identifier: Apache-2.0
"""Replay sampled answers with the whole cache while the engine is idle (`--kv-shadow`).

A replay is a request of this process: the prompt and the answer together are its prompt, whose log
probabilities say which tokens the whole cache would have chosen (teacher forcing); so it takes one
prefill. It starts only when no request waits or runs, and the next request aborts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from vllm.inputs.engine import tokens_input
from vllm.logger import init_logger
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from vllm_pyramid.compat import finished_requests
from vllm_pyramid.compat.finished_requests import FinishedRequest, is_idle
from vllm_pyramid.frontend.sessions import Key, Tenants
from vllm_pyramid.frontend.shadow_judge import ShadowJudge
from vllm_pyramid.frontend.shadow_metrics import Comparison, ShadowMetrics
from vllm_pyramid.policy.request import (
    FULL_POLICY,
    KEEP_EVERYTHING,
    TEMPLATE_KEY,
    ServedRequest,
    check_request,
)
from vllm_pyramid.policy.request_keys import EXACT, RequestKeys
from vllm_pyramid.policy.served_settings import ServedSettings

logger = init_logger(f"vllm.{__name__}")

# In the front end alone: the application of a request whose policy averages nothing by it.
APPLICATION_KEY = "vllm_pyramid_application"
# What a report says of a request that ran with the whole cache because its application has to.
REPORT_KEY = "kv_shadow"
_LEFT_OUT = (
    *("kv_budget", "kv_min_tokens", "kv_top_n", "kv_attend_budget", "kv_keep", "kv_application"),
    *("kv_turn_mode", TEMPLATE_KEY),
)
MAX_QUEUED = 32
MAX_TRIES = 5
_POLL_S = 0.1
_REPLAYS: ContextVar[bool] = ContextVar("vllm_pyramid_replays", default=False)
_SHADOWS: WeakKeyDictionary[InputProcessor, Shadow] = WeakKeyDictionary()
# The client of the engine that this process's API server serves.
_client: Callable[[], Any] | None = None


def use_client(client: Callable[[], Any]) -> None:
    """Replay through what `client` returns."""
    global _client
    _client = client


def shadow_of(processor: InputProcessor) -> Shadow | None:
    """Return what compares an engine's answers; None if nothing does, or before a request."""
    return _SHADOWS.get(processor)


@dataclass
class _Job:
    key: Key
    finished: FinishedRequest
    first: int
    tries: int = 0


class Shadow:
    """Samples, replays and judges the requests of one engine."""

    def __init__(
        self, settings: ServedSettings, max_model_len: int, metrics: ShadowMetrics
    ) -> None:
        assert settings.shadow is not None
        self._settings, self._max_len, self._metrics = settings, max_model_len, metrics
        self.judge = ShadowJudge(settings.shadow, settings.shadow_floor, metrics)
        self._tenants = Tenants()
        self._queue: deque[_Job] = deque()
        self._runner: asyncio.Task[None] | None = None
        self._replay: asyncio.Task[Comparison] | None = None

    @classmethod
    def of(cls, processor: InputProcessor, settings: ServedSettings | None) -> Shadow | None:
        """Return what compares an engine's answers; None if it was not asked for."""
        if settings is None or settings.shadow is None:
            return None
        shadow = cls(settings, processor.model_config.max_model_len, ShadowMetrics())
        _SHADOWS[processor] = shadow
        finished_requests.install(shadow)
        return shadow

    def begin(self, params: Any) -> Any:
        """Return parameters from which a `kv_application` that the policy has no use for is taken.

        Raises:
            ValueError: the client set the key that holds it.
        """
        extra = params.extra_args
        if not extra:
            return params
        if APPLICATION_KEY in extra:
            raise ValueError(f"{APPLICATION_KEY} cannot be set by requests: leave it out")
        if extra.get("kv_application") is None or self._settings.policy.allocator.samples:
            return params
        name = RequestKeys.parse({"kv_application": extra["kv_application"]}).application
        params = params.clone()  # the object may be the client's
        params.extra_args = {**extra, APPLICATION_KEY: name}
        del params.extra_args["kv_application"]
        return params

    def choose(self, request: Any, found: ServedRequest) -> ServedRequest:
        """Stop a replay; sample the request, or change its settings so that it keeps everything.

        Returns:
            How the request is served.
        """
        if _REPLAYS.get():
            return found
        if self._replay is not None:
            self._replay.cancel()
        params = request.sampling_params
        extra = dict(params.extra_args or {})
        name = extra.pop(APPLICATION_KEY, found.application)
        key = Key(self._tenants.name(request.cache_salt), name)
        params.extra_args = extra or None
        if can_be_compared(request) and self.judge.takes(key):
            finished_requests.note(request, key)
        elif self.judge.runs_full(key) and found.policy.evicts:
            extra = {name: value for name, value in extra.items() if name not in _LEFT_OUT}
            extra |= KEEP_EVERYTHING
            if extra.get("kv_turns") is not None:
                extra["kv_turn_mode"] = EXACT
            params.extra_args = extra
            finished_requests.note(request, FULL_POLICY)
            found = check_request(
                self._settings.policy, params, self._settings.why_no_turns, self._settings.turn_mode
            )
        return found

    def on_finishing(self, note: Key | str, report: dict[str, Any]) -> None:
        """Say in the report that the request ran with the whole cache, if `note` is `full`.

        Any other note is the application whose sample the request is.
        """
        if note == FULL_POLICY:
            report[REPORT_KEY] = FULL_POLICY

    def on_finished(self, note: Key | str, finished: FinishedRequest) -> None:
        """Let a sampled request be replayed when the engine is idle."""
        length = len(finished.prompt) + len(finished.answer)
        first = first_compared(finished.report)
        if not isinstance(note, Key) or first is None or length >= self._max_len:
            return
        if len(finished.answer) <= first:
            return
        if len(self._queue) >= MAX_QUEUED:
            self._metrics.drop("queue")
            return
        self._queue.append(_Job(note, finished, first))
        if self._runner is None or self._runner.done():
            self._runner = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        """Replay what is queued, one after the other, whenever the engine is idle."""
        while self._queue:
            client = None if _client is None else _client()
            if client is None or not is_idle(client):
                await asyncio.sleep(_POLL_S)
                continue
            job = self._queue.popleft()
            self._replay = asyncio.ensure_future(compare(client, job.finished, job.first))
            try:
                await asyncio.wait({self._replay})
                self._take(job, self._replay)
            finally:
                self._replay.cancel()
                self._replay = None

    def _take(self, job: _Job, replay: asyncio.Task[Comparison]) -> None:
        """Count a replay that has ended, or queue it again if a request came before."""
        if replay.cancelled():
            job.tries += 1
            if job.tries < MAX_TRIES:
                self._queue.append(job)
            else:
                self._metrics.drop("busy")
        elif (error := replay.exception()) is not None:
            logger.warning("kv-shadow: a replay has failed: %s: %s", type(error).__name__, error)
            self._metrics.drop("failed")
        else:
            report = job.finished.report
            evicted = bool(report.get("evicted_tokens") or report.get("evicted_after"))
            self.judge.add(job.key, replay.result(), evicted=evicted)


def can_be_compared(request: Any) -> bool:
    """Return whether the answer of a request is what its model finds likeliest, and nothing else.

    Greedy requests are, if nothing changes the logits: a key of other software may be a logits
    processor's. Images are not replayed.
    """
    params = request.sampling_params
    keys = params.extra_args or {}
    changes = (
        *(params.logit_bias, params.allowed_token_ids, params.bad_words, params.min_tokens),
        *(params.structured_outputs, params.presence_penalty, params.frequency_penalty),
        *(request.mm_features, request.prompt_embeds is not None, request.lora_request),
        params.thinking_token_budget is not None,
        any(not key.startswith(("kv_", "vllm_pyramid_")) for key in keys),
    )
    return (
        params.temperature < 1e-5
        and params.n == 1
        and params.repetition_penalty == 1.0
        and request.prompt_token_ids is not None
        and not any(changes)
    )


def first_compared(report: dict[str, Any]) -> int | None:
    """Return the first token of an answer that is not the whole cache's; None: all are.

    A policy that evicts at the prompt's end takes the answer's first token from the whole cache;
    under pressure, all tokens before the first eviction are from there.
    """
    evicted_after: list[int] = report.get("evicted_after", [1])
    return evicted_after[0] if evicted_after else None


async def compare(engine_client: Any, finished: FinishedRequest, first: int) -> Comparison:
    """Replay an answer with the whole cache, and compare its tokens from `first` on.

    A salt of its own keeps the replay apart from the prefixes of requests.
    """
    _REPLAYS.set(True)
    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=dict(KEEP_EVERYTHING),
    )
    name = secrets.token_hex(16)
    prompt = tokens_input([*finished.prompt, *finished.answer], cache_salt=name)
    rows: list[Any] = []
    answers = engine_client.generate(prompt, params, f"kv-shadow-{name}")
    async with contextlib.aclosing(answers):
        async for output in answers:
            rows = output.prompt_logprobs
    found = [
        row[token] for token, row in zip(finished.answer, rows[len(finished.prompt) :], strict=True)
    ]
    agreed = sum(entry.rank == 1 for entry in found[first:])
    if finished.logprob is None:
        return Comparison(len(found) - first, agreed)
    lost = finished.logprob - sum(entry.logprob for entry in found)
    return Comparison(len(found) - first, agreed, lost, len(found))
