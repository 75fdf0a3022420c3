# SPDX-License-Identifier: Apache-2.0
"""A step's report on what `sample_tokens` returns, finished or in flight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_pyramid.compat.runner import send_report
from vllm_pyramid.compat.side_channel import StepReport, read_report
from vllm_pyramid.plan import Eviction
from vllm_pyramid.step.failures import SCORES, Failure, StepFailures


class InFlight(AsyncModelRunnerOutput):
    """vLLM's output whose tokens are still computed, with the attribute of either runner."""

    def __init__(self, name: str) -> None:
        setattr(self, name, ModelRunnerOutput(req_ids=["r"], req_id_to_index={"r": 0}))
        self.name = name

    def get_output(self) -> ModelRunnerOutput:
        output: ModelRunnerOutput = getattr(self, self.name)
        return output


class Late:
    """An event after which the device's flags are on the host."""

    def __init__(self, flags: torch.Tensor) -> None:
        self.flags = flags

    def synchronize(self) -> None:
        self.flags[1] = True


@pytest.mark.parametrize("name", ["_model_runner_output", "model_runner_output"])
def test_flags_are_read_when_the_tokens_are(name: str) -> None:
    copied = torch.tensor([False, False])
    failures = StepFailures(
        {"x": Failure("method", "y")}, [(SCORES, ("r", "s"))], copied, Late(copied)
    )
    report = StepReport({"r": Eviction(5)}, {}, {}, 0)
    output: Any = send_report(InFlight(name), report, failures)
    assert not copied.any()  # nothing was waited for
    sent = read_report(output.get_output())
    assert set(sent.failures) == {"x", "s"} and sent.failures["s"][0] == SCORES
    assert sent.evictions == {"r": Eviction(5)}


def test_a_step_without_news_sends_nothing() -> None:
    output = ModelRunnerOutput(req_ids=["r"], req_id_to_index={"r": 0})
    same = send_report(output, StepReport({}, {}, {}, 0), StepFailures({}))
    assert same is output and not vars(output).keys() & {"vllm_pyramid_report"}


def test_a_failure_alone_is_sent() -> None:
    output = ModelRunnerOutput(req_ids=["r"], req_id_to_index={"r": 0})
    failures = StepFailures({"r": Failure(SCORES, "NaN")})
    sent = read_report(send_report(output, StepReport({}, {}, {}, 0), failures))
    assert sent.failures == {"r": (SCORES, "NaN")}
