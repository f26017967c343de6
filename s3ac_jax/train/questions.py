"""The task of questions with known answers: read, cleaned, asked, and graded by their answers."""

from collections.abc import Sequence

import numpy as np

from s3ac_jax.config.run import RunConfig
from s3ac_jax.config.tasks import Questions
from s3ac_jax.core.types import Rollout, Scored
from s3ac_jax.data.asking import Wording, ask
from s3ac_jax.data.chat import ChatTemplate, load_template
from s3ac_jax.data.choices import Lettered
from s3ac_jax.data.hf_tokenizer import HFTokenizer
from s3ac_jax.data.overlap import without_overlap
from s3ac_jax.data.problems import Joined, Problem, ProblemsError, Taken
from s3ac_jax.data.prompts import PromptSet, question_prompts
from s3ac_jax.data.tokenizer import ByteTokenizer, Tokenizer
from s3ac_jax.rewards.answers import AnswerVerifier
from s3ac_jax.rewards.pool import GraderPool
from s3ac_jax.train.sources import problems_of
from s3ac_jax.train.tasks import Demonstrate, Split, Task, check_vocabulary


def question_task(config: Questions, run: RunConfig) -> Task:
    """Training questions that neither the held-out sets nor the run's suites ask, and those sets.

    Raises ValueError, TokenizerError or ProblemsError, each one line. Source: ours.
    """
    folder = run.start.hf
    tokenizer, template = _text(folder)
    check_vocabulary(tokenizer, run)
    train = Joined("train", [problems_of(name, one) for name, one in config.train.items()])
    held_out = Joined("held_out", [problems_of(name, one) for name, one in config.held_out.items()])
    index, asked_once, notes = np.arange(len(train)), np.arange(len(held_out)), []
    if config.deduplicate:
        suites = run.evaluation.suites.items()
        asked = [problems_of(name, one.source) for name, one in suites if one.source]
        kept = without_overlap(train, [held_out, *asked])
        index, notes = kept.index, [f"train: {line}" for line in kept.lines()]
        once = without_overlap(held_out)
        asked_once = once.index
        notes += [f"held_out: {line}" for line in once.lines()]
    wording = Wording(config.instruction, config.system, config.thinking)

    def split(
        sets: Joined, index: np.ndarray, names: Sequence[str]
    ) -> tuple[PromptSet, list[Problem]]:
        problems = Lettered(Taken(sets, index), seed=config.seed)
        asked = ask(problems, tokenizer, template, wording, config.max_prompt_tokens)
        numbers = sets.number(index[asked.kept])
        for number, name in enumerate(names):
            if not (numbers == number).any():
                raise ProblemsError(
                    f"task.{sets.name}.{name}: no question is left, for all are too long or asked "
                    "elsewhere; raise task.max_prompt_tokens, or leave this source out"
                )
        if asked.dropped:
            notes.append(
                f"{sets.name}: left out {asked.dropped} of {len(index)} questions whose prompt has "
                f"more than {config.max_prompt_tokens} tokens (the longest {asked.longest})"
            )
        prompts = question_prompts(asked, numbers, names)
        return prompts, [problems[int(place)] for place in asked.kept]

    halves = [
        split(train, index, list(config.train)),
        split(held_out, asked_once, list(config.held_out)),
    ]
    prompts, problems = halves[0]
    sizes = np.bincount(prompts.levels, minlength=len(config.train))
    weights = [source.weight for source in config.train.values()]
    sets = tuple(zip(map(int, sizes), weights, strict=True))
    demonstrate = None if folder else _demonstrate(run, tokenizer, prompts, problems, sets)
    grader = GraderPool(config.graders, deadline_seconds=config.deadline_s)
    splits = [Split(asked, AnswerVerifier(golds, tokenizer, grader)) for asked, golds in halves]
    return Task(
        tokenizer,
        train=splits[0], held_out=splits[1], demonstrate=demonstrate, template=template,
        grader=grader, sets=sets, notes=tuple(notes),
    )  # fmt: skip


def _text(folder: str) -> tuple[Tokenizer, ChatTemplate | None]:
    if not folder:
        return ByteTokenizer(), None
    tokenizer = HFTokenizer(folder)
    return tokenizer, load_template(folder, tokenizer)


def box(answer: str) -> str:
    """A final answer as the grader looks for it. Source: ours."""
    return f"\\boxed{{{answer}}}"


def _demonstrate(
    run: RunConfig, tokenizer: Tokenizer, prompts: PromptSet, problems: Sequence[Problem],
    sets: Sequence[tuple[int, float]],
) -> Demonstrate:  # fmt: skip
    """Right answers in a box; a hasty writer guesses: what he writes answers another question."""
    width = run.rollout.max_response_tokens
    ids = [[*tokenizer.encode(box(one.answer)), tokenizer.stop_ids[0]] for one in problems]
    short = np.array([len(one) <= width for one in ids])
    if not short.any():
        raise ProblemsError(
            f"no answer fits into rollout.max_response_tokens ({width}); the shortest needs "
            f"{min(map(len, ids))}"
        )
    # Sets come as often as in training.
    share = np.repeat([weight / size for size, weight in sets], [size for size, _ in sets]) * short
    share = share / share.sum()
    tokens = np.full((len(ids), width), tokenizer.pad_id, np.int32)
    for row in np.flatnonzero(short):
        tokens[row, : len(ids[row])] = ids[row]
    lengths = np.array([len(one) for one in ids], np.int32)

    def demonstrate(rng: np.random.Generator, number: int, *, slope: float, most: float) -> Scored:
        del slope  # of a rate that grows with the steps of a problem; here it has none
        index = rng.choice(len(ids), number, p=share).astype(np.int32)
        guess = rng.choice(len(ids), number, p=share)
        written = np.where(rng.random(number) < most, guess, index)
        zeros, yes = np.zeros((number, width)), np.ones(number, bool)
        rollout = Rollout(
            prompts.take(index), tokens[written], lengths[written], zeros.astype(np.float32), yes,
            zeros.astype(np.int32),
        )  # fmt: skip
        return Scored(rollout, np.ones(number, np.float32), yes, yes)

    return demonstrate
