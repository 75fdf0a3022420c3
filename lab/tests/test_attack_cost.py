# SPDX-License-Identifier: Apache-2.0
"""`make attack-cost` sends what it says, and compares what belongs together."""

from __future__ import annotations

import json

import pytest
from vllm.sampling_params import SamplingParams

from lab.attack_cost import ATTACK_PROMPT, PAIRS, attack_body, settings
from vllm_pyramid.policy import load_policy
from vllm_pyramid.policy.request import check_request

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("kind", [*PAIRS, "plain"])
def test_attacks_are_refused_or_accepted_as_they_say(kind: str) -> None:
    policy = load_policy("pyramidkv", "64")
    sent = set()
    for number in range(40):
        body = attack_body("/a/model", kind, number)
        assert len(body) < 1 << 16
        extra = json.loads(body)["vllm_xargs"]
        assert extra == settings(kind, number)
        sent.add(json.dumps(extra))
        params = SamplingParams(max_tokens=1)
        params.extra_args = extra
        if kind == "refused":
            with pytest.raises(ValueError, match=r"kv|vllm_xargs"):
                check_request(policy, params)
        else:
            check_request(policy, params).check_turns(ATTACK_PROMPT)
    assert len(sent) > 30 or kind != "accepted"
