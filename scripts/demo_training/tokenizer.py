# SPDX-License-Identifier: Apache-2.0
"""The built-in model's tokenizer: byte-level BPE, so that any text can go in."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, repeat

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from vllm_pyramid.tools.eval.phrases import name_words

SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>")
BEGIN, END, PAD = SPECIAL_TOKENS[0], SPECIAL_TOKENS[1], SPECIAL_TOKENS[5]


# How often each word of a name counts as seen: enough to become a token, as it is in the large
# vocabularies of real models.
NAME_WORD_COUNT = 1000


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE in which every digit is a token of its own, with the space before it.

    The words of the tasks' names become tokens too.

    Raises:
        ValueError: the texts are too short to give that many tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(" ?[0-9]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        chain(texts, repeat(" ".join(f"{a}-{n}" for a, n in name_words()), NAME_WORD_COUNT)),
        trainer=trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"{tokenizer.get_vocab_size()} tokens came of the text, not {vocab_size}")
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, begin)]
    )
    return tokenizer
