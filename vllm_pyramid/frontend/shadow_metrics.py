# SPDX-License-Identifier: Apache-2.0
"""The Prometheus metrics of answers that are compared with the whole cache (`--kv-shadow`)."""

from __future__ import annotations

import os
from collections import Counter as Counts
from typing import NamedTuple

from vllm_pyramid.frontend.metrics import counter, gauge

# Clients choose the names of applications, and each is a series of its own in Prometheus.
MAX_LABELS = 64
OTHERS = "(others)"
# Comparisons after which what came before counts half.
_HALVED_EVERY = 1024


class Comparison(NamedTuple):
    """An answer, as the whole cache sees it.

    Attributes:
        tokens: compared ones. agreed: those that the whole cache finds likeliest, too.
        lost: log probability that the answer loses with the whole cache, in nats, summed over
            `logprobs` tokens; these are 0 where the client asked for no log probabilities.
    """

    tokens: int
    agreed: int
    lost: float = 0.0
    logprobs: int = 0


class Labels:
    """Chooses the applications that have series of their own: those that are used most.

    An application without a label takes that of the one with the lowest count, and its count: one
    that has a larger share of the uses than 1 in `MAX_LABELS` keeps its label, whatever names come
    in between. Older uses count less. Where series cannot be removed, labels stay.
    """

    def __init__(self, *, removable: bool) -> None:
        self._removable, self._uses, self._total = removable, Counts[str](), 0

    def use(self, application: str) -> tuple[str, str | None]:
        """Count a use of an application; return its label, and one that is to be removed."""
        gone = None
        if application not in self._uses and len(self._uses) >= MAX_LABELS:
            if not self._removable:
                return OTHERS, None
            gone = min(self._uses, key=self._uses.__getitem__)
            self._uses[application] = self._uses.pop(gone)
        self._uses[application] += 1
        self._total += 1
        if self._total % _HALVED_EVERY == 0:
            self._uses = Counts({name: count // 2 for name, count in self._uses.items()})
        return application, gone

    def __contains__(self, application: object) -> bool:
        return application in self._uses


class ShadowMetrics:
    """The metrics of `--kv-shadow` (docs/usage.md lists them); one object per process."""

    def __init__(self) -> None:
        self._by_cache = [
            counter(f"shadow_{name}", text, "application", "cache")
            for name, text in (
                ("requests", "Answers compared with the whole cache."),
                ("tokens", "Tokens that were compared."),
                ("agreed_tokens", "Compared tokens that the whole cache finds likeliest, too."),
                ("logprob_tokens", "Compared tokens whose log probabilities the client asked for."),
                ("lost_nats", "Log probability that answers lose with the whole cache."),
            )
        ]
        self._full = gauge(
            "shadow_full", "Tenants whose application runs with the whole cache.", "application"
        )
        self._dropped = counter("shadow_dropped", "Answers that could not be compared.", "reason")
        # The Prometheus client cannot remove series that several processes share.
        removable = not {"PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"} & os.environ.keys()
        self._labels = Labels(removable=removable)
        self._num_full: Counts[str] = Counts()  # by application, positive ones alone

    def _label(self, application: str) -> str:
        """Return the label of an application that is compared."""
        label, gone = self._labels.use(application)
        if gone is not None:
            for series in self._by_cache:
                for cache in ("evicted", "whole"):
                    series.remove(gone, cache)
            self._full.remove(gone)
            self._show_full(application)
            self._show_full(gone)
        return label

    def add(self, application: str, comparison: Comparison, *, evicted: bool) -> None:
        """Count a comparison."""
        labels = (self._label(application), "evicted" if evicted else "whole")
        tokens, agreed, lost, logprobs = comparison
        numbers = 1, tokens, agreed, logprobs, max(lost, 0.0)
        for series, number in zip(self._by_cache, numbers, strict=True):
            series.labels(*labels).inc(number)

    def count_full(self, application: str, change: int) -> None:
        """Count a tenant whose application began (1) or ceased (-1) to run with the whole cache."""
        if change:
            self._num_full[application] += change
            if not self._num_full[application]:
                del self._num_full[application]
            self._show_full(application, always=True)

    def _show_full(self, application: str, *, always: bool = False) -> None:
        """Show the count of an application, and of all without a label."""
        if application in self._labels:
            if always or self._num_full[application]:
                self._full.labels(application).set(self._num_full[application])
            return
        others = (count for name, count in self._num_full.items() if name not in self._labels)
        self._full.labels(OTHERS).set(sum(others))

    def drop(self, reason: str) -> None:
        """Count an answer that is not compared."""
        self._dropped.labels(reason).inc()
