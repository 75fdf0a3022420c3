# SPDX-License-Identifier: Apache-2.0
"""What the front end answers before a request reaches the engine core."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.exceptions import VLLMValidationError

from vllm_pyramid.compat.input_processor import check_images

pytestmark = pytest.mark.cpu


def test_images_that_attend_both_ways_are_refused() -> None:
    gemma, qwen = (SimpleNamespace(is_mm_prefix_lm=both) for both in (True, False))
    text, image = SimpleNamespace(mm_features=None), SimpleNamespace(mm_features=["an image"])
    with pytest.raises(VLLMValidationError, match="both directions: send text"):
        check_images(gemma, image)  # type: ignore[arg-type]
    for model, request in ((gemma, text), (qwen, image), (qwen, text)):
        check_images(model, request)  # type: ignore[arg-type]
