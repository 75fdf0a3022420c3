# SPDX-License-Identifier: Apache-2.0
"""The requests of a worker that must end with an error, so that no other request is hurt.

    an eviction    a request's scores have NaN, or a method raises -> `add`, `flag`, `add_error`
    end of a step  over ranks (`sum_over_ranks`) and stages, then `take` -> report to the scheduler

The scheduler alone ends requests. Until it does, every rank and stage goes on as if the request had
been evicted as planned: nothing but its own tokens depends on its skips.

On the CPU a wrong score is found before anything moves, so the request keeps its cache. On other
devices the host does not wait for the answer: a flag for each request stays on the device, wrong
scores are replaced, and the flags travel to the host with the step's tokens.

Some scorers see nothing of a NaN in the cache: they look at no key, compare, or count. So the last
layer's attention of each request that is evicted from is looked at, too.

Where several workers compute a step together, a call may raise in one of them while the others wait
inside it, or take another way for good. Such an error is not a request's: the worker ends
(`worker/adapter.py`), and the executor then ends all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.logger import init_logger

from vllm_pyramid.plan import PlanMismatchError
from vllm_pyramid.step.ranks import Ranks
from vllm_pyramid.step.upload import upload

logger = init_logger(f"vllm.{__name__}")

SCORES, METHOD = "scores", "method"
KINDS = (SCORES, METHOD)


class Failure(NamedTuple):
    """Why a request ends with an error: one of `KINDS`, and a reason for client and log."""

    kind: str
    reason: str


# What a worker says of a flag, which has no text.
_FLAGGED = {
    SCORES: Failure(
        SCORES, "its scores or its attention have NaN or infinity: its tokens cannot be ranked"
    ),
    METHOD: Failure(
        METHOD, "a method failed or returned wrong places; a worker's log says which, and why"
    ),
}


class StepFailures(NamedTuple):
    """The failures that one step reports, of which some may still be on their way to the host.

    Attributes:
        known: by request id.
        flags: the kind and the requests of each part of `copied`.
        copied: truth values on the host once `ready` has happened; None without flags.
        ready: an event of the device; None where nothing is waited for.
    """

    known: dict[str, Failure]
    flags: Sequence[tuple[str, tuple[str, ...]]] = ()
    copied: torch.Tensor | None = None
    ready: Any = None

    def wait(self) -> dict[str, Failure]:
        """Return all failures, when the device has computed them."""
        if self.ready is not None:
            self.ready.synchronize()
        failures = dict(self.known)
        if self.copied is not None:
            names = [(kind, name) for kind, request_ids in self.flags for name in request_ids]
            for index in self.copied.nonzero().flatten().tolist():
                kind, request_id = names[index]
                failures.setdefault(request_id, _FLAGGED[kind])
        return failures


class Failures:
    """The failed requests that a worker knows; one object for all steps.

    Attributes:
        of: the failures that the host knows, by request id, until the request is forgotten.
        has_peers: whether other workers compute each step together with this one.
        reports_evictions: whether this worker reports its failures to the scheduler in steps with
            evictions alone: a pipeline stage that is not the last one.
    """

    def __init__(self) -> None:
        self.of: dict[str, Failure] = {}
        self.has_peers = self.reports_evictions = False
        self._unreported: dict[str, Failure] = {}
        self._flags: dict[tuple[str, tuple[str, ...]], torch.Tensor] = {}
        self._traced: set[tuple[str, str]] = set()

    def add(self, request_ids: Iterable[str], failure: Failure) -> None:
        """Let requests end with an error; the first failure of a request is the one reported."""
        for request_id in request_ids:
            if request_id not in self.of:
                self.of[request_id] = self._unreported[request_id] = failure

    def flag(self, failure: Failure, request_ids: Sequence[str], wrong: torch.Tensor) -> None:
        """Let those requests fail for which `wrong`, `[S]` truth values on the device, is true.

        The host does not wait, so the failure has no more than its kind.
        """
        if wrong.device.type == "cpu":
            rows = wrong.nonzero().flatten().tolist()
            self.add([request_ids[row] for row in rows], failure)
            return
        key = failure.kind, tuple(request_ids)
        known = self._flags.get(key)
        self._flags[key] = wrong if known is None else known | wrong

    def add_error(
        self, request_ids: Sequence[str], what: str, error: Exception, *, peers_wait: bool = False
    ) -> None:
        """Let the requests fail for which a method's call raised `error`; call it in the `except`
        clause.

        The log has each kind of traceback once. `error` is raised again where no request is
        concerned (warm-up, graph capture), the device itself has failed, scheduler and worker
        disagree, or `peers_wait`: another worker may wait inside the call.
        """
        is_of_all = isinstance(error, (torch.AcceleratorError, PlanMismatchError))
        if not request_ids or is_of_all or (peers_wait and self.has_peers):
            raise error
        text = f"{what}: {type(error).__name__}: {error}"
        if (key := (what, type(error).__name__)) not in self._traced:
            self._traced.add(key)
            logger.exception("%d requests end with an error: %s", len(request_ids), text)
        self.add(request_ids, Failure(METHOD, text))

    def forget(self, request_id: str) -> None:
        """Forget a request, which has finished or comes again."""
        self.of.pop(request_id, None)
        self._unreported.pop(request_id, None)

    # The end of a step ----------------------------------------------------------------------------

    def on_host(self, request_ids: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return which requests have failed, as far as the host knows: `[kinds, E]`, 0 or 1."""
        failed = [self.of.get(request_id, ("",))[0] for request_id in request_ids]
        return np.array([[one == kind for one in failed] for kind in KINDS], np.int64)

    def add_from_host(self, request_ids: Sequence[str], failed: npt.NDArray[np.int64]) -> None:
        """Add what another stage's `on_host` returned."""
        for kind, row in zip(KINDS, failed, strict=True):
            self.add([request_ids[index] for index in np.flatnonzero(row)], _FLAGGED[kind])

    def sum_over_ranks(
        self, request_ids: Sequence[str], ranks: Ranks, device: torch.device
    ) -> None:
        """Let all tensor-parallel ranks know of the failures that each has found, in the same
        steps.

        `request_ids` are of the E requests that have come to an eviction.
        """
        if ranks.size == 1:
            return
        places = {request_id: index for index, request_id in enumerate(request_ids)}
        failed = upload(self.on_host(request_ids).astype(np.float32), device)
        for (kind, flagged), wrong in list(self._flags.items()):
            if all(request_id in places for request_id in flagged):
                index = upload(np.array([places[name] for name in flagged], np.int64), device)
                failed[KINDS.index(kind)].index_add_(0, index, wrong.float())
                del self._flags[kind, flagged]
        total = ranks.all_reduce(failed) > 0
        for kind, wrong in zip(KINDS, total, strict=True):
            self.flag(_FLAGGED[kind], request_ids, wrong)

    def wait(self) -> None:
        """Read the flags, waiting for the device: another stage's worker needs them now."""
        for (kind, request_ids), wrong in self._flags.items():
            self.flag(_FLAGGED[kind], request_ids, wrong.cpu())
        self._flags = {}

    def take(self) -> StepFailures:
        """Return what has failed since the last call, and begin to copy the flags to the host."""
        known, self._unreported = self._unreported, {}
        flags, self._flags = self._flags, {}
        if not flags:
            return StepFailures(known)
        wrong = torch.cat(list(flags.values()))
        copied = torch.empty(wrong.shape, dtype=torch.bool).pin_memory()
        copied.copy_(wrong, non_blocking=True)
        ready = torch.Event(wrong.device)
        ready.record()
        return StepFailures(known, list(flags), copied, ready)
