# SPDX-License-Identifier: Apache-2.0
"""Replays recorded agents on an engine: each turn is sent when the one before has been answered."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, takewhile
from typing import Any

from vllm_pyramid.policy.served_settings import ServedSettings
from vllm_pyramid.tools.bench.engine import Engine, sampling
from vllm_pyramid.tools.bench.samples import Request, Sample, Step, engine_sample
from vllm_pyramid.tools.bench.scheduler_log import pages_counted
from vllm_pyramid.tools.bench.tasks import main
from vllm_pyramid.tools.child_process import say


@dataclass(frozen=True)
class Turn:
    """A turn of a recorded agent, which is a list of these.

    Attributes:
        number: of its path from the agent's beginning, from 1.
        before: the turn, of the agent's list, behind whose answer it is sent; None for a first one.
        shared: tokens that its prompt has in common with the prompt of that turn.
        rest: tokens behind those; with the engine's own answers, behind the answer to that prompt.
        prompt_len: tokens of its prompt; with the engine's own answers, at most.
        max_tokens: of its answer.
        wait: seconds between the answer before it and the moment it is sent.
        fixed: tokens before the first message, if the agent has tools: a server keeps them.
    """

    number: int
    before: int | None
    shared: int
    rest: list[int]
    prompt_len: int
    max_tokens: int
    wait: float
    fixed: int = 0


@dataclass
class _Agent:
    """An agent under way.

    Attributes:
        number: in the file. turns: all of them. left: how many have not been answered.
        prompts: of the turns that were sent and have not been answered.
    """

    number: int
    turns: Sequence[Turn]
    left: int
    prompts: dict[int, list[int]] = field(default_factory=dict)


class Replay:
    """A replay on one engine.

    Args:
        budget: of each request; None where nothing is evicted.
        turn_mode: of sessions; None sends no session.
        salt: of all prompts and sessions, so that none finds what an earlier replay has left.
        own_answers: prompts have the engine's answers, up to a token of `ends`.
        on_finish: called when the last turn of an agent has been answered.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        budget: str | None,
        turn_mode: str | None,
        salt: str,
        own_answers: bool,
        ends: Sequence[int],
        on_finish: Callable[[], None],
    ) -> None:
        self._engine, self._budget, self._turn_mode = engine, budget, turn_mode
        self._salt, self._own_answers, self._ends = salt, own_answers, set(ends)
        self._on_finish = on_finish
        served = ServedSettings.of(engine.client.vllm_config)
        self._keeps_tools = served is not None and served.keep_tools
        self._waiting: list[_Agent] = []
        self._due: list[tuple[float, int, _Agent, int, list[int]]] = []
        self._order = count()
        self._sent: dict[str, tuple[_Agent, int, float]] = {}
        self._first: dict[str, float] = {}
        self._requests: list[Request] = []
        self._answers: list[dict[str, Any]] = []

    def run(self, agents: Sequence[Sequence[Turn]], concurrency: int | None) -> Sample:
        """Run all agents, `concurrency` of them at once.

        Returns:
            A sample, and of each request its `turn`, times, tokens found and answered (`requests`).
        """
        engine, steps = self._engine, list[Step]()
        engine.log.preemptions = 0
        pages = pages_counted(engine.scheduler)
        self._waiting = [_Agent(i, turns, len(turns)) for i, turns in enumerate(agents)]
        begin = time.perf_counter()
        for _ in range(min(concurrency or len(agents), len(agents))):
            self._begin(begin)
        while self._due or engine.client.has_unfinished_requests():
            now = time.perf_counter()
            while self._due and self._due[0][0] <= now:
                self._send(*heapq.heappop(self._due))
            if engine.client.has_unfinished_requests():
                steps.append(engine.step(self._on_output, len(self._requests)))
            else:
                time.sleep(max(0.0, self._due[0][0] - time.perf_counter()))
        minutes = (time.perf_counter() - begin) / 60
        sample = engine_sample(steps, self._requests, engine.log.preemptions)
        sample |= {"requests_per_min": len(self._requests) / minutes, "requests": self._answers}
        return sample | pages_counted(engine.scheduler, pages)

    def _begin(self, now: float) -> None:
        """Have the next agent begin."""
        agent = self._waiting.pop(0)
        for index, turn in enumerate(agent.turns):
            if turn.before is None:
                self._add(agent, index, turn.rest, now)

    def _add(self, agent: _Agent, index: int, prompt: list[int], now: float) -> None:
        due = now + agent.turns[index].wait
        heapq.heappush(self._due, (due, next(self._order), agent, index, prompt))

    def _send(self, due: float, _: int, agent: _Agent, index: int, prompt: list[int]) -> None:
        own: dict[str, Any] = {}
        if self._turn_mode is not None:
            own = {"kv_session": f"agent-{agent.number}", "kv_turn_mode": self._turn_mode}
        turn = agent.turns[index]
        if self._keeps_tools and turn.fixed:
            own["kv_keep"] = [0, turn.fixed]
        params = sampling(turn.max_tokens, self._budget, **own)
        name = self._engine.send(prompt, params, self._salt)
        self._sent[name] = (agent, index, due)
        agent.prompts[index] = prompt

    def _on_output(self, output: Any, now: float) -> None:
        name, tokens = output.request_id, list(output.outputs[0].token_ids)
        if tokens:
            self._first.setdefault(name, now)
        if not output.finished:
            return
        agent, index, due = self._sent.pop(name)
        turn, prompt = agent.turns[index], agent.prompts.pop(index)
        if len(tokens) != turn.max_tokens:
            raise RuntimeError(f"{len(tokens)} tokens came back in the place of {turn.max_tokens}")
        evicted = (output.kv_transfer_params or {}).get("evicted_tokens", 0) > 0
        cached = output.num_cached_tokens or 0
        first = self._first.pop(name) - due
        one = Request(first, now - due, len(tokens), len(prompt), cached, evicted)
        self._requests.append(one)
        place = {"agent": agent.number, "index": index, "turn": turn.number}
        self._answers.append({**place, **one._asdict(), "answer": tokens})
        answer = list(takewhile(lambda token: token not in self._ends, tokens))
        for later, after in enumerate(agent.turns):
            if after.before == index:
                middle = answer if self._own_answers else []
                self._add(agent, later, [*prompt[: after.shared], *middle, *after.rest], now)
        agent.left -= 1
        if not agent.left:
            self._on_finish()
            if self._waiting:
                self._begin(now)


def replay(
    engine: Engine,
    agents: list[list[dict[str, Any]]],
    concurrency: int | None,
    **settings: Any,
) -> Sample:
    """Replay agents whose turns came as JSON; `settings` are those of `Replay`."""
    turns = [[Turn(**turn) for turn in agent] for agent in agents]
    return Replay(engine, **settings).run(turns, concurrency)


if __name__ == "__main__":
    main(lambda engine: {"replay": partial(replay, engine, on_finish=lambda: say(progress=1))})
