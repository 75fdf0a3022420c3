# SPDX-License-Identifier: Apache-2.0
"""The options of each measure of `vllm-pyramid bench`: fields make flags, help and validation."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    AliasChoices,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from vllm_pyramid.tools.bench.shapes import SHAPES
from vllm_pyramid.tools.command_parts import parse_engine_args


def _split(value: Any) -> Any:
    """Return the parts of a list such as `full,snapkv`, each once."""
    if not isinstance(value, str):
        return value
    return tuple(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))


_List = (BeforeValidator(_split), Field(min_length=1))
Names = Annotated[tuple[str, ...], *_List]
# Whole requests that the KV cache has room for. A prompt is held in full until it is processed.
Requests = Annotated[float, Field(ge=1, allow_inf_nan=False)]
Pools = Annotated[tuple[Requests, ...], BeforeValidator(_split)]
AtLeastTwo = Annotated[int, Field(ge=2)]  # output tokens: prefill gives the first
ROOM = "(prompt and output) that the cache has room for without eviction"
BUDGET = AliasChoices("budget", "budgets")


class EngineOptions(BaseModel):
    """Options of all measures."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True)

    out: Path = Field(Path("bench-results"), description="folder for the results")
    json_file: Path | None = Field(None, alias="json", description="write the rows there too")
    model: str = Field(
        "small",
        description=f"a shape with random weights ({', '.join(SHAPES)}), `built-in`, a folder or a "
        "Hugging Face name",
    )
    layers: PositiveInt | None = Field(None, description="of a shape, if not its own number")
    policies: Names = Field(
        ("stock", "pyramidkv"),
        description="names, .yaml files, `stock` and `stock-prefix-caching` for vLLM without this "
        "plugin, each with another type of KV cache if need be (`snapkv@fp8`); the others are "
        "compared with the first",
    )
    budgets: Names = Field(
        ("12%",),
        validation_alias=BUDGET,
        description="tokens or per cent, one or several, for policies that evict",
    )
    prompt_len: PositiveInt = Field(2048, description="tokens")
    output_len: AtLeastTwo = Field(64, description="tokens")
    num_prompts: PositiveInt = Field(16, description="requests")
    kv_swap_space: float | None = Field(
        None,
        gt=0,
        lt=2**20,
        allow_inf_nan=False,
        description="GiB of host memory for V, of policies that keep it there (as much as the "
        "cache)",
    )
    repetitions: PositiveInt = Field(3, description="of each measurement")
    threads: PositiveInt | None = Field(
        None, description="of each engine on the CPU (OMP_NUM_THREADS, or all)"
    )
    engine_args: Annotated[dict[str, Any], BeforeValidator(parse_engine_args)] = Field(
        {}, description="JSON, further arguments of vllm_pyramid.LLM"
    )
    pools: Pools = ()

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt of the job."""
        return self.prompt_len

    @property
    def rounds(self) -> list[tuple[float, int]]:
        """Each pool with each number of a repetition."""
        pools = self.pools or (float(self.num_prompts),)
        return [(pool, number) for pool in pools for number in range(self.repetitions)]


class Throughput(EngineOptions):
    """tokens per second at equal cache memory"""

    decode_only: bool = Field(
        False,
        description="only steady decoding: prefill what has room, then alternate in windows of "
        "steps",
    )
    pools: Annotated[Pools, Field(min_length=1)] = Field(
        (4.0,),
        validation_alias="pool_prompts",
        description=f"whole requests {ROOM}, one number or several; one with --decode-only",
    )

    @model_validator(mode="after")
    def _check_pools(self) -> Throughput:
        if self.decode_only and len(self.pools) > 1:
            raise ValueError("--pool-prompts: give one number with --decode-only")
        return self


class Prefix(EngineOptions):
    """conversations and shared system prompts, with prefix caching where a variant has it"""

    policies: Names = Field(
        ("stock-prefix-caching", "auto"),
        description="names, .yaml files, `stock`, `stock-prefix-caching`, and `stock-offloading` "
        "for vLLM with --kv-offloading-size (not on the CPU); the others are compared with the "
        "first",
    )
    prompt_len: PositiveInt = Field(1024, description="tokens that a user adds in each turn")
    num_prompts: PositiveInt = Field(8, description="conversations")
    turns: PositiveInt = Field(
        8, description="of a conversation, each sent when the one before has been answered"
    )
    shared_len: Annotated[int, Field(ge=0)] = Field(
        0, description="tokens with which all conversations begin: a system prompt"
    )
    concurrency: PositiveInt | None = Field(
        None, description="conversations under way at once (all)"
    )
    resume: bool = Field(
        False,
        description="requests of our policies say where their turns ended (kv_turns), so that each "
        "goes on with what the turn before has kept",
    )
    host_cache: Annotated[NonNegativeFloat, Field(allow_inf_nan=False)] = Field(
        0.0, description="GiB of host memory: --kv-host-cache, and --kv-offloading-size; 0: none"
    )
    pools: Pools = Field(
        (),
        validation_alias="pool_prompts",
        description="numbers of whole conversations that the cache has room for without eviction "
        "(all)",
    )

    @property
    def longest_prompt(self) -> int:
        answers = (self.turns - 1) * self.output_len
        return self.shared_len + self.turns * self.prompt_len + answers


MEASURES: dict[str, type[EngineOptions]] = {
    "throughput": Throughput,
    "prefix": Prefix,
}


Options = TypeVar("Options", bound=EngineOptions)


def _flags(name: str, alias: str | AliasPath | AliasChoices | None) -> list[str]:
    names = alias.choices if isinstance(alias, AliasChoices) else [alias or name]
    return [f"--{one}".replace("_", "-") for one in names]


def _shown(value: Any) -> str:
    """Return a default as a help text shows it."""
    if isinstance(value, tuple):
        return ",".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def add_flags(parser: argparse.ArgumentParser, model: type[BaseModel]) -> None:
    """Add a flag for every field. The value of a flag that is not given is None."""
    for name, field in model.model_fields.items():
        flags = _flags(name, field.validation_alias)
        text = field.description or ""
        if field.default not in (None, False, {}, ()):
            text += f" ({_shown(field.default)})"
        text = text.replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(*flags, dest=name, action="store_true", default=None, help=text)
        else:
            parser.add_argument(*flags, dest=name, metavar=flags[0].lstrip("-").upper(), help=text)


def parse(model: type[Options], given: Mapping[str, Any]) -> Options:
    """Return the options of a measure from its flags' namespace; ValueError names a wrong flag."""
    values = {name: given[name] for name in model.model_fields if given.get(name) is not None}
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        said = first["msg"].removeprefix("Value error, ")
        if not first["loc"] or said.startswith("--"):
            raise ValueError(said) from None
        name = str(first["loc"][0])
        field = model.model_fields.get(name)
        (flag, *_) = _flags(name, field.validation_alias if field is not None else None)
        if first["type"] == "value_error":
            raise ValueError(f"{flag}: {said}") from None
        raise ValueError(f"{flag} {first['input']!r}: {said}") from None
