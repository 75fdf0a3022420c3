# SPDX-License-Identifier: Apache-2.0
"""The error that stops an engine: the scheduler and a worker do not follow the same plan."""

from __future__ import annotations


class PlanMismatchError(RuntimeError):
    """A worker is to do something that a request's plan rules out.

    It may then hold another number of tokens than the scheduler believes, whose blocks would go to
    other requests too early. So the engine stops, not one request.
    """
