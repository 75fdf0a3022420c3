# SPDX-License-Identifier: Apache-2.0
"""Caches of results that requests choose the size of: bounded by bytes, not by entries."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from operator import itemgetter
from threading import Lock
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

import numpy as np
from cachetools import LRUCache
from cachetools.keys import hashkey

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

# Bytes of an entry of a dictionary and of an ordered one, and of a small object, at most.
_ENTRY = 300
_SMALL = 400


class Cached(Protocol, Generic[P, R_co]):
    """A function whose latest results are kept."""

    cached: LRUCache[Any, Any]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Return the kept result of equal arguments, or call the function."""


def cached_by_bytes(most_bytes: int) -> Callable[[Callable[P, R]], Cached[P, R]]:
    """Keep results of a function, at most `most_bytes` of results and arguments together.

    Equal arguments get the same object as long as it is kept; the least recently used ones are
    dropped first, and what is larger than the cache is not kept. Arguments are positional.
    """

    def decorate(function: Callable[P, R]) -> Cached[P, R]:
        entries: LRUCache[Any, tuple[R, int]] = LRUCache(most_bytes, getsizeof=itemgetter(1))
        lock = Lock()

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            assert not kwargs, "arguments of a cached function are positional"
            key = hashkey(*args)  # which computes the hash of its parts once
            with lock:
                if (entry := entries.get(key)) is not None:
                    return entry[0]
            result = function(*args, **kwargs)
            size = _ENTRY + size_of(args) + size_of(result)
            with lock:
                if size <= most_bytes:
                    result = entries.setdefault(key, (result, size))[0]
            return result

        found = cast(Cached[P, R], call)
        found.cached = entries
        return found

    return decorate


def size_of(value: object) -> int:
    """Return the bytes of a value at most; objects say theirs as `num_bytes`."""
    if isinstance(value, tuple | list):
        if value and type(value[0]) in (int, float):  # then all are: turns or shares
            return 100 + 40 * len(value)
        return 100 + sum(8 + size_of(item) for item in value)
    if isinstance(value, np.ndarray):
        return _SMALL + value.nbytes
    if type(value) is int or isinstance(value, float):
        return 32
    if isinstance(value, str):
        return 80 + 4 * len(value)
    return int(getattr(value, "num_bytes", _SMALL))
