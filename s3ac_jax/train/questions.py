"""The task of questions with known answers: read, cleaned, asked, and graded by their answers."""

from collections.abc import Mapping, Sequence

import numpy as np

from s3ac_jax.config.run import RunConfig
from s3ac_jax.config.sources import SourceConfig
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
from s3ac_jax.train.tasks import Demonstrate, HeldOut, Split, Task, check_vocabulary


def question_task(config: Questions, run: RunConfig) -> Task:
    """Training questions that neither the held-out sets nor the run's suites ask, and those sets.

    Raises ValueError, TokenizerError, ProblemsError or GraderError, each one line. Source: ours.
    """
    asking = _Asking(config, run)
    train, held_out = _joined("train", config.train), _joined("held_out", config.held_out)
    index = np.arange(len(train))
    if config.deduplicate:
        suites = run.evaluation.suites.items()
        asked = [
            problems_of(name, one.source, where=f"evaluation.suites.{name}.source")
            for name, one in suites
            if one.source is not None
        ]
        kept = without_overlap(train, [held_out, *asked])
        index = kept.index
        asking.notes += [f"train: {line}" for line in kept.lines()]
    prompts, problems = asking.half(train, index, config.train)
    held_out_prompts, held_out_problems = asking.held_out(held_out)
    sizes = np.bincount(prompts.levels, minlength=len(config.train))
    weights = [source.weight for source in config.train.values()]
    sets = tuple(zip(map(int, sizes), weights, strict=True))
    demonstrate = None
    if not run.start.hf:
        demonstrate = _demonstrate(run, asking.tokenizer, prompts, problems, sets)
    grader = _grader(config, [*problems, *held_out_problems])
    return Task(
        asking.tokenizer,
        train=Split(prompts, AnswerVerifier(problems, asking.tokenizer, grader)),
        held_out=Split(
            held_out_prompts, AnswerVerifier(held_out_problems, asking.tokenizer, grader)
        ),
        demonstrate=demonstrate, template=asking.template, grader=grader, sets=sets,
        notes=tuple(asking.notes),
    )  # fmt: skip


def held_out_questions(config: Questions, run: RunConfig) -> HeldOut:
    """The held-out half of `question_task`, which is the same without the training set.

    Raises as that. Source: ours.
    """
    asking = _Asking(config, run)
    prompts, problems = asking.held_out(_joined("held_out", config.held_out))
    grader = _grader(config, problems)
    split = Split(prompts, AnswerVerifier(problems, asking.tokenizer, grader))
    return HeldOut(asking.tokenizer, split, asking.template, grader)


class _Asking:
    """How this run asks. notes: what was left out, for people."""

    def __init__(self, config: Questions, run: RunConfig):
        self._config = config
        self._wording = Wording(config.instruction, config.system, config.thinking)
        self.tokenizer, self.template = _text(run.start.hf)
        check_vocabulary(self.tokenizer, run)
        self.notes: list[str] = []

    def half(
        self, sets: Joined, index: np.ndarray, sources: Mapping[str, SourceConfig]
    ) -> tuple[PromptSet, list[Problem]]:
        """Prompts and problems of these places of the sets."""
        config, names = self._config, list(sources)
        problems = Lettered(Taken(sets, index), seed=config.seed)
        asked = ask(
            problems, self.tokenizer, self.template, self._wording, config.max_prompt_tokens
        )
        numbers = sets.number(index[asked.kept])
        for number, name in enumerate(names):
            if not (numbers == number).any():
                raise ProblemsError(
                    f"task.{sets.name}.{name}: no question is left, for all are too long or asked "
                    "elsewhere; raise task.max_prompt_tokens, or leave this source out"
                )
        if asked.dropped:
            self.notes.append(
                f"{sets.name}: left out {asked.dropped} of {len(index)} questions whose prompt has "
                f"more than {config.max_prompt_tokens} tokens (the longest {asked.longest})"
            )
        return question_prompts(asked, numbers, names), [
            problems[int(place)] for place in asked.kept
        ]

    def held_out(self, sets: Joined) -> tuple[PromptSet, list[Problem]]:
        """The held-out half, each question once."""
        index = np.arange(len(sets))
        if self._config.deduplicate:
            once = without_overlap(sets)
            index = once.index
            self.notes += [f"held_out: {line}" for line in once.lines()]
        return self.half(sets, index, self._config.held_out)


def _joined(name: str, sources: Mapping[str, SourceConfig]) -> Joined:
    return Joined(
        name,
        [problems_of(one, source, where=f"task.{name}.{one}") for one, source in sources.items()],
    )


def _grader(config: Questions, problems: Sequence[Problem]) -> GraderPool:
    """A pool that knows every kind that the problems ask for."""
    grader = GraderPool(config.graders, deadline_seconds=config.deadline_s)
    try:
        grader.check({problem.kind for problem in problems})
    except BaseException:
        grader.close()
        raise
    return grader


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
