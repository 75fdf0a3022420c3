# SPDX-License-Identifier: Apache-2.0
"""The built-in model as it is shipped."""

from __future__ import annotations

import pytest

from vllm_pyramid.tools.demo import model_path
from vllm_pyramid.tools.eval.haystack import topics

pytestmark = pytest.mark.cpu


def test_tokenizer_round_trips_any_text() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path())
    english = "\n\n".join(topics().values())
    for sample in ("A plain sentence, 42.", "naïve 漢字 😀\t\x07\n", english[:5000]):
        ids = tokenizer(sample).input_ids
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == sample
    assert len(english) / len(tokenizer(english).input_ids) > 2.5  # it did learn English
    digits = tokenizer("is 48213.", add_special_tokens=False).input_ids
    assert [tokenizer.decode([token]) for token in digits[1:]] == [" 4", *"8213", "."]
