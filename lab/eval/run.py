# SPDX-License-Identifier: Apache-2.0
"""A run of tasks over policies and budgets: make the samples, fill engines, keep what comes back.

Every result is appended to a file as soon as it is there, under a key that names the model, the
policy's definition, the budget and the prompt. A later run takes from it what it needs, which is
how an interrupted run continues.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from lab.eval.recall import Measured, Recalls
from lab.eval.store import Store, identity_of_model, key_of
from lab.eval.task import Sample, Task
from lab.eval.variants import Variant, budgets_of
from vllm_pyramid.frontend.model_shape import longest_of_model
from vllm_pyramid.tools.eval.engine import Request, Work, answer_all
from vllm_pyramid.tools.eval.haystack import Tokens
from vllm_pyramid.tools.eval.result import Result

# The label of the whole cache's answers, with which others are compared.
REFERENCE = "the whole cache's own answers"


@dataclass(frozen=True)
class Settings:
    """What is to be measured.

    Attributes:
        model: folder or Hugging Face name. policies: each with arguments of its own.
        budgets: for each policy that evicts. tasks: in the order of the tables.
        lengths: of the prompts, in tokens. samples: of each task, length and seed.
        seeds: each makes other samples. engine_args: further arguments of `LLM`.
        max_prompt: most tokens of a prompt that may be cut; None for what the model takes.
    """

    model: str
    policies: tuple[Variant, ...]
    budgets: tuple[str, ...]
    tasks: tuple[Task, ...]
    lengths: tuple[int, ...]
    samples: int
    seeds: tuple[int, ...]
    engine_args: dict[str, Any] = field(default_factory=dict)
    max_prompt: int | None = None


@dataclass(frozen=True)
class Job:
    """One sample under one policy and budget."""

    task: Task
    variant: Variant
    length: int
    seed: int
    sample: Sample
    request: Request

    @property
    def policy(self) -> str:
        """Return what tables call the policy."""
        return self.variant.label

    @property
    def budget(self) -> str:
        """Return the budget as requested; "100%" where nothing is evicted."""
        return self.request.budget or "100%"


@dataclass(frozen=True)
class Answer(Job):
    """A job with its result."""

    result: Measured


class Run:
    """The jobs of a run. Making one makes the samples; `execute` needs the engines.

    Raises:
        ValueError: a policy, budget, task or length that cannot work.
    """

    def __init__(self, settings: Settings, tokens: Tokens) -> None:
        self.settings = settings
        self._longest = longest_of_model(settings.model)
        made = [
            (task, length, seed, sample, *self._encode(tokens, task, length, sample))
            for task in settings.tasks
            for length in task.lengths(settings.lengths)
            for seed in task.seeds(settings.seeds)
            for sample in task.samples(tokens, length, settings.samples, seed)
        ]
        identity = identity_of_model(settings.model)
        needing = ", ".join(task.name for task in settings.tasks if task.needs_recall)
        self.jobs: list[Job] = []
        # The request for the whole cache's own answer, by the key of one that is compared with it.
        self._references: dict[str, Request] = {}
        for variant in settings.policies:
            if needing and (reason := variant.attends_in_part) is not None:
                raise ValueError(
                    f"policy {variant.label!r} {reason}, so the full attention that {needing} "
                    "measures is never computed: name other tasks (--tasks), or leave the policy "
                    "out"
                )
            for budget in budgets_of(variant.load(), settings.budgets):
                if budget is not None:
                    variant.load(budget)  # raises where they do not suit each other
                engine_args = settings.engine_args | variant.engine_args
                where = [identity, engine_args, variant.definition(), budget]
                for task, length, seed, sample, prompt, forced, turns in made:
                    what = [prompt, forced, sample.max_tokens, task.needs_recall]
                    what += [True] if sample.follows_full else []
                    said = turns if variant.turns else []
                    request = Request(
                        key=key_of(where, what + ([{"turns": said}] if said else [])),
                        prompt_token_ids=prompt,
                        budget=budget,
                        max_tokens=sample.max_tokens,
                        forced=forced,
                        turns=said,
                    )
                    if sample.follows_full:
                        key = key_of([identity, settings.engine_args, REFERENCE], what)
                        whole: dict[str, Any] = {"key": key, "budget": None, "turns": []}
                        self._references[request.key] = request.model_copy(
                            update=whole | {"is_reference": True}
                        )
                    self.jobs.append(Job(task, variant, length, seed, sample, request))

    def missing(self, store: Store) -> dict[str, list[Request]]:
        """Return the requests without a result in the store, each once, by the policy's label.

        First, under `REFERENCE`, come those whose answers others are compared with.
        """
        wanted: dict[str, dict[str, Request]] = {}
        seen: set[str] = set()  # variants share what does not differ between them
        for job in self.jobs:
            if job.request.key in seen or store.get(job.request.key) is not None:
                continue
            seen.add(job.request.key)
            needed = self._references.get(job.request.key)
            if needed is not None and store.get(needed.key) is None:
                wanted = {REFERENCE: {}, **wanted}
                wanted[REFERENCE][needed.key] = needed
            wanted.setdefault(job.policy, {})[job.request.key] = job.request
        return {label: list(requests.values()) for label, requests in wanted.items()}

    def execute(
        self, store: Store, on_stage: Callable[[str], None], on_result: Callable[[], None]
    ) -> None:
        """Fill the store, one engine after the other.

        Raises:
            ChildError: an engine failed.
        """
        since = perf_counter()

        def begin_stage(said: str) -> None:
            nonlocal since
            since = perf_counter()
            on_stage(said)

        kinds = {job.request.key: (job.task.name, job.length, job.budget) for job in self.jobs}
        missing = self.missing(store)
        labelled = {REFERENCE: Variant("full"), **{v.label: v for v in self.settings.policies}}
        for label, variant in labelled.items():
            if not (requests := missing.get(label)):
                continue
            requests = [self._with_reference(request, store) for request in requests]
            longest = max(len(r.prompt_token_ids) + r.answer_tokens for r in requests)
            engine_args = self.settings.engine_args | variant.engine_args
            work = Work(
                label=label,
                model=self.settings.model,
                kv_policy=variant.policy,
                kv_policy_args=dict(variant.args),
                policy_name=variant.load().name,
                engine_args={"max_model_len": longest + 1, **engine_args},
                requests=sorted(requests, key=_order),
            )
            mixed = _mixed_batches(work, kinds)
            with closing(self._measured(work, begin_stage)) as results:
                for key, result in results:
                    seconds, since = perf_counter() - since, perf_counter()
                    own = None if key in mixed else seconds
                    store.put(key, {**result.model_dump(), "seconds": own})
                    on_result()

    def _measured(
        self, work: Work, on_stage: Callable[[str], None]
    ) -> Generator[tuple[str, Result], None, None]:
        """Yield each request's key and result, with its recall where a task needs that."""
        if not any(task.needs_recall for task in self.settings.tasks):
            yield from answer_all(work, on_stage)
            return
        with TemporaryDirectory(prefix="vllm-pyramid-") as folder:
            recalls = Recalls(Path(folder))
            traced = work.model_copy(
                update={"engine_args": {**work.engine_args, "kv_trace": folder}}
            )
            with closing(answer_all(traced, on_stage)) as results:
                for key, result in results:
                    yield key, recalls.of(result)

    def _with_reference(self, request: Request, store: Store) -> Request:
        """Return the request as it is run: with the answer that it is compared with."""
        if request.key not in self._references:
            return request
        found = Result.model_validate(store.get(self._references[request.key].key)).reference
        assert found is not None
        update = {"forced": found.token_ids, "reference": found, "max_tokens": 0}
        return request.model_copy(update=update)

    def answers(self, store: Store) -> Iterator[Answer]:
        """Yield every job with its result.

        Raises:
            RuntimeError: a result is missing: the run was not executed to its end.
        """
        for job in self.jobs:
            result = store.get(job.request.key)
            if result is None:
                raise RuntimeError(f"no result of {job.task.name}, {job.policy}, {job.budget}")
            yield Answer(**vars(job), result=Measured.model_validate(result))

    def _encode(
        self, tokens: Tokens, task: Task, length: int, sample: Sample
    ) -> tuple[list[int], list[int], list[int]]:
        """Return the ids of the prompt and of what is given behind it, and where turns end."""
        prompt, forced = tokens.encode(sample.prompt), []
        if given := sample.answers[0] if sample.forced else sample.lead:
            both = tokens.encode(sample.prompt + given)
            if both[: len(prompt)] != prompt:
                raise ValueError(
                    "this model's tokenizer does not split the prompt and its continuation at the "
                    f"same place: near {sample.prompt[-20:]!r} and {given[:20]!r}"
                )
            forced = both[len(prompt) :]
        answer = sample.max_tokens + len(forced) + 1
        room = None if self._longest is None else self._longest - answer
        if sample.may_be_cut:
            limits = [limit for limit in (room, self.settings.max_prompt) if limit is not None]
            prompt = _without_middle(prompt, min([len(prompt), *limits]))
        elif room is not None and len(prompt) > room:
            shorter = f"at most {length - len(prompt) + room}" if length else "shorter prompts"
            raise ValueError(
                f"the task {task.name!r} at length {length} needs {len(prompt) + answer} tokens "
                f"with its answer, and the model takes {self._longest}: ask for {shorter}"
            )
        turns = [tokens.encode(sample.prompt[:end]) for end in sample.turns]
        if any(prompt[: len(turn)] != turn for turn in turns):
            raise ValueError("this model's tokenizer does not split a chat where its turns end")
        return prompt, forced, list(map(len, turns))


def _without_middle(ids: list[int], length: int) -> list[int]:
    """Return `length` of the ids, half from the front and half from the end."""
    if length < 2:
        raise ValueError("the model leaves no room for a prompt and its answer")
    return ids[: length // 2] + ids[len(ids) - (length - length // 2) :]


def _mixed_batches(work: Work, kinds: Mapping[str, object]) -> set[str]:
    """Return the keys of requests that share a batch, and its time, with another kind."""
    keys = [request.key for request in work.requests]
    batches = [keys[start : start + work.batch] for start in range(0, len(keys), work.batch)]
    return {key for batch in batches if len({kinds.get(k) for k in batch}) > 1 for key in batch}


def _order(request: Request) -> tuple[int, int, int]:
    """Return a sort key that puts the shortest first: then the time left is soon known.

    Of prompts of about one length (within a factor of two) those with the shortest answers come
    first: a batch takes as many steps as its longest answer has tokens.
    """
    prompt = len(request.prompt_token_ids)
    return (prompt - 1).bit_length(), request.answer_tokens, prompt
