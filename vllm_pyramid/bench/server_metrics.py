# SPDX-License-Identifier: Apache-2.0
"""What a server says of itself under `/metrics`: counts, and the most that was seen of a gauge."""

from __future__ import annotations

import re
import urllib.request
from threading import Event, Thread
from types import TracebackType

from vllm_pyramid.child_process import ChildError

__all__ = ["DIRECT", "Sampler", "evictions"]

# The servers are on this machine, whatever proxy the environment names for the others.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
INTERVAL_S = 0.5
_RUNNING = "vllm:num_requests_running"
_BLOCKS = "vllm_pyramid:blocks_held"
_EVICTIONS = "vllm_pyramid:evictions_total"


def _text(url: str, timeout: float) -> str:
    with DIRECT.open(f"{url}/metrics", timeout=timeout) as answer:
        text: str = answer.read().decode()
    return text


def _total(text: str, name: str) -> int | None:
    """The sum over all labels (engines, layers); None where the server has no such metric."""
    found = re.findall(rf"^{re.escape(name)}\{{.*\}} (\S+)$", text, re.MULTILINE)
    return int(sum(float(value) for value in found)) if found else None


def evictions(url: str) -> int:
    """What a server with a policy counts, since its start.

    Raises:
        ChildError: it does not answer.
    """
    try:
        text = _text(url, 60)
    except OSError as error:
        raise ChildError(f"the server does not say what it has evicted: {error}") from error
    return _total(text, _EVICTIONS) or 0


class Sampler:
    """Looks at a server's gauges twice a second, from the first line of a `with` to its last.

    What a server holds between two looks is not seen, so the values are lower bounds. A look costs
    the server some milliseconds at the most. One that gets no answer is left out: a server that has
    ended is noticed by those who send requests to it.

    Attributes:
        running: the most requests that ran at once (vLLM's count: whose prompt is being processed,
            or that decode). blocks: the most blocks of one layer held at once, all layers added up.
            None where no look saw any: of stock vLLM, without such a gauge, or of too short a run.
        looks: how many were answered.
    """

    def __init__(self, url: str, interval_s: float = INTERVAL_S) -> None:
        self.running: int | None = None
        self.blocks: int | None = None
        self.looks = 0
        self._url = url
        self._interval_s = interval_s
        self._end = Event()
        self._thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(self._interval_s):
            self._look()

    def _look(self) -> None:
        try:
            text = _text(self._url, 10 * self._interval_s)
        except OSError:
            return
        self.running = _most(self.running, _total(text, _RUNNING))
        self.blocks = _most(self.blocks, _total(text, _BLOCKS))
        self.looks += 1


def _most(before: int | None, now: int | None) -> int | None:
    """The greater; nothing seen is None, not 0."""
    return max(before or 0, now or 0) or None
