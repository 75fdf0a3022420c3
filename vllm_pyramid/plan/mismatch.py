# SPDX-License-Identifier: Apache-2.0
"""The error that stops an engine: the scheduler and a worker do not follow the same plan."""

from __future__ import annotations


class PlanMismatchError(RuntimeError):
    """A worker is to do something that a request's plan rules out.

    What it holds may then be another number of tokens than the scheduler believes, which would give
    its blocks to other requests too early. So no request is blamed for it: the engine stops.
    """
