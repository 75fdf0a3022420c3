# SPDX-License-Identifier: Apache-2.0
"""The KV budget: the average number of prompt tokens kept per layer and KV head."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction

from vllm_pyramid.plan.quoted import quoted

MAX_TOKENS = 2**31 - 1
MAX_DECIMALS = 6  # of a percentage: a share of a prompt of a million tokens to a hundredth of one
MAX_TEXT = 20  # characters
_TOKENS = re.compile(r"-?[0-9]+")
_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*%")
_HOW = "give a number of tokens such as 512, or a share of the prompt such as '12%'"


@dataclass(frozen=True)
class Budget:
    """Either a number of tokens or a share of the prompt: `tokens` or `percent`, never both.

    This is what the papers call KV size: the mean over layers and KV heads of the tokens that
    survive the end of prefill, observation window and sinks included.

    Attributes:
        tokens: a fixed number of tokens, at least 1.
        percent: a share of the prompt in percent, above 0 and at most 100, held exactly.
        min_tokens: the floor of a share, so shorter prompts are kept whole; None: not set. It does
            not apply to a number of tokens.
    """

    tokens: int | None = None
    percent: Fraction | None = None
    min_tokens: int | None = None

    def __post_init__(self) -> None:
        assert (self.tokens is None) != (self.percent is None)

    @classmethod
    def parse(cls, value: object) -> Budget:
        """Parse `512`, `"512"`, `"12%"` or `"12.5%"`; ValueError says what is expected."""
        if isinstance(value, Budget):
            return value
        # bool is an int to Python, but a budget of `true` is a mistake.
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError(f"budget {quoted(value)} is a {type(value).__name__}: {_HOW}")
        tokens = value
        if isinstance(value, str):
            text = value.strip() if len(value) <= MAX_TEXT else ""
            if match := _PERCENT.fullmatch(text):
                return cls._from_percent(match.group(1))
            if not _TOKENS.fullmatch(text):
                raise ValueError(
                    f"budget {quoted(value)} cannot be read: {_HOW}, in at most {MAX_TEXT} "
                    "characters"
                )
            tokens = int(text)
        assert isinstance(tokens, int)
        if not 1 <= tokens <= MAX_TOKENS:
            raise ValueError(
                f"budget {quoted(value)} is out of range: it must be at least 1 token and at most "
                f"{MAX_TOKENS}; {_HOW}"
            )
        return cls(tokens=tokens)

    @classmethod
    def _from_percent(cls, digits: str) -> Budget:
        decimals = len(digits.partition(".")[2])
        if decimals > MAX_DECIMALS:
            raise ValueError(
                f"budget '{digits}%' has {decimals} decimals, and a share of the prompt has at "
                f"most {MAX_DECIMALS}"
            )
        percent = Fraction(digits)
        if not 0 < percent <= 100:
            raise ValueError(
                f"budget '{digits}%' is out of range: a share of the prompt must be above 0% and "
                "at most 100%"
            )
        return cls(percent=percent)

    @property
    def value(self) -> int | str:
        """The budget as a user writes it, without its floor: `512` or `'12%'`; `parse` reads it."""
        if self.tokens is not None:
            return self.tokens
        assert self.percent is not None
        # Every percentage comes from a finite decimal, so its denominator divides a power of ten.
        places = 0
        while (self.percent * 10**places).denominator != 1:
            places += 1
        whole, rest = divmod(int(self.percent * 10**places), 10**places)
        return f"{whole}.{rest:0{places}d}%" if places else f"{whole}%"

    def __str__(self) -> str:
        return str(self.value)

    def with_floor(self, min_tokens: int | None) -> Budget:
        """Return the budget with a floor, unless it has one already."""
        return replace(self, min_tokens=min_tokens) if self.min_tokens is None else self

    def floor(self, min_budget: int) -> int:
        """Return the tokens kept of any prompt that is long enough; see `tokens_for`."""
        return self.tokens or max(min_budget, self.min_tokens or 0)

    def tokens_for(self, prompt_len: int, min_budget: int) -> int:
        """Return the tokens per layer and KV head for a prompt, at most the prompt's own.

        Shares are rounded up. Shares of short prompts are raised to `min_tokens`, and to
        `min_budget`, the tokens that the policy needs (window + sinks + 1).
        """
        if self.tokens is not None:
            return min(self.tokens, prompt_len)
        assert self.percent is not None
        share = self.percent.numerator * prompt_len
        rounded_up = -(-share // (100 * self.percent.denominator))
        return min(max(rounded_up, self.floor(min_budget)), prompt_len)
