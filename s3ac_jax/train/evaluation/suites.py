"""Suites made ready: questions read, put through the template, and who grades their answers."""

import dataclasses
import hashlib
import string
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from s3ac_jax.config.boundary import plain
from s3ac_jax.config.evaluation import EvaluationConfig, SuiteConfig
from s3ac_jax.core.errors import RunError
from s3ac_jax.core.types import Prompt
from s3ac_jax.data.asking import Wording, ask
from s3ac_jax.data.chat import ChatTemplate
from s3ac_jax.data.choices import Lettered, permuted
from s3ac_jax.data.problems import Joined, Problem, ProblemList, Problems
from s3ac_jax.data.tokenizer import Tokenizer
from s3ac_jax.rewards.answers import AnswerVerifier
from s3ac_jax.rewards.pool import GraderPool
from s3ac_jax.rewards.verifier import Verifier
from s3ac_jax.rollout.backend import Sampling, seeded_sampling
from s3ac_jax.train.sources import problems_of
from s3ac_jax.train.tasks import Split


class EvaluationError(RunError):
    """An evaluation that can't be made; the message is one line for the user. Source: ours."""


@dataclasses.dataclass(frozen=True)
class Suite:
    """One suite, ready to be answered. P problems, Q prompts.

    ids [P]: of the problems. tokens [Q, T], num_tokens [Q]: prompts. prompt_of [S, P]: the prompt
    of each sample of each problem; S is 1 where all samples have the same one. kinds [Q]: how each
    is graded, empty for a task with a verifier of its own. letters [S, P]: in which order the
    options stand, empty where there are none. dropped: ids of problems with too long a prompt.
    levels: of each problem, as the run calls them; empty where there are none. made_with: what
    decides a response and its verdict, but not how many there are.
    Source: ours.
    """

    name: str
    config: SuiteConfig
    ids: tuple[str, ...]
    tokens: np.ndarray
    num_tokens: np.ndarray
    prompt_of: np.ndarray
    kinds: tuple[str, ...]
    letters: np.ndarray
    verifier: Verifier
    dropped: tuple[str, ...]
    levels: Mapping[str, str]
    made_with: dict[str, Any]
    seed: int
    stop_ids: tuple[int, ...]

    @property
    def told(self) -> dict[str, Any]:
        """Its config as records and results keep it. Source: ours."""
        return plain(self.config)

    @property
    def rows(self) -> int:
        """Responses wanted: all samples of the first problem, then of the next. Source: ours."""
        return len(self.ids) * self.config.samples

    def places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Problem, sample and prompt of these rows. Source: ours."""
        problem, sample = np.divmod(rows, self.config.samples)
        return problem, sample, self.prompt_of[sample % len(self.prompt_of), problem]

    def prompt(self, rows: np.ndarray) -> Prompt:
        """What these rows are answers to. Source: ours."""
        _, _, index = self.places(rows)
        return Prompt(index.astype(np.int32), self.tokens[index], self.num_tokens[index])

    def seeds(self, rows: np.ndarray) -> np.ndarray:
        """Of these rows' sampling, uint32 [rows].

        Source: ours: from names and numbers alone, so that neither order, nor chunks, nor a resume,
        nor another suite beside it can change a response.
        """
        problem, sample, _ = self.places(rows)
        return np.array(
            [
                sample_seed(self.seed, self.name, self.ids[p], int(s))
                for p, s in zip(problem, sample, strict=True)
            ],
            np.uint32,
        )

    def sampling(self, rows: np.ndarray) -> Sampling:
        """How these rows are sampled. Source: ours."""
        config = self.config
        return seeded_sampling(
            self.seeds(rows), temperature=config.temperature, top_p=config.top_p,
            top_k=config.top_k, max_tokens=config.max_response_tokens, stop_ids=self.stop_ids,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Suites with all that answering them needs; made once, used as often as wanted.

    grader: of the suites' own questions. Source: ours.
    """

    config: EvaluationConfig
    suites: tuple[Suite, ...]
    tokenizer: Tokenizer
    grader: GraderPool
    owns_grader: bool = True

    def close(self) -> None:
        """Ends the grader's processes, unless somebody else began them. Source: ours."""
        if self.owns_grader:
            self.grader.close()


def sample_seed(seed: int, suite: str, problem: str, sample: int) -> int:
    """The seed of one response. Source: ours: a hash, for `hash` differs between processes."""
    text = "\0".join((str(seed), suite, problem, str(sample)))
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=4)
    return int.from_bytes(digest.digest(), "big")


def prepare_suites(
    config: EvaluationConfig,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    held_out: Split | None = None,
    grader: GraderPool | None = None,
) -> Prepared:
    """Reads and asks all suites.

    template: None for plain text. held_out: what a suite without a source is. grader: of all
    answers, whoever graded held_out before; closed by whoever gave it. One is made when None, whose
    processes begin when an answer needs them.
    Raises RunError, in one line. Source: ours.
    """
    own = grader is None
    grader = grader or GraderPool()
    try:
        suites = [
            _held_out(name, suite, config, tokenizer, held_out, grader)
            if suite.source is None
            else _asked(
                problems_of(name, suite.source, where=f"suites.{name}.source"),
                suite,
                config,
                tokenizer,
                template,
                grader,
            )
            for name, suite in config.suites.items()
        ]
        grader.check({kind for suite in suites for kind in suite.kinds if kind})
    except BaseException:
        if own:
            grader.close()
        raise
    # Padded to the longest prompt there is, not to the longest allowed: prefill reads the padding.
    # To one width for all suites: each width is a program of its own.
    width = max((int(suite.num_tokens.max()) for suite in suites), default=0)
    return Prepared(
        config, tuple(_padded(suite, width, tokenizer.pad_id) for suite in suites), tokenizer,
        grader, own,
    )  # fmt: skip


def _padded(suite: Suite, width: int, pad_id: int) -> Suite:
    tokens = np.full((len(suite.tokens), width), pad_id, np.int32)
    shared = min(width, suite.tokens.shape[1])
    tokens[:, :shared] = suite.tokens[:, :shared]
    return dataclasses.replace(suite, tokens=tokens)


def _asked(
    problems: Problems, suite: SuiteConfig, config: EvaluationConfig, tokenizer: Tokenizer,
    template: ChatTemplate | None, grader: GraderPool,
) -> Suite:  # fmt: skip
    name, count = problems.name, len(problems)
    # A list refuses ids that come twice: a record is of the problem with its id.
    problems = chosen = ProblemList(name, [problems[place] for place in range(count)])
    # A fixed order of the options would favour whoever likes its letter: each sample has its own.
    several = any(problem.options for problem in chosen)
    turns = suite.samples if several else 1
    shown = Joined(name, [Lettered(problems, seed=config.seed, sample=s) for s in range(turns)])
    wording = Wording(suite.instruction, suite.system, suite.thinking)
    asked = ask(shown, tokenizer, template, wording, suite.max_prompt_tokens)
    row_of = np.full(turns * count, -1)
    row_of[asked.kept] = np.arange(len(asked.kept))
    prompt_of = row_of.reshape(turns, count)
    # All samples of a problem or none: an average over some of them would be of other problems.
    whole = np.all(prompt_of >= 0, axis=0).tolist()
    if not any(whole):
        raise EvaluationError(
            f"suites.{name}: no problem has all its prompts within {suite.max_prompt_tokens} "
            "tokens; raise max_prompt_tokens"
        )
    letters = [[_letters(problem, config.seed, s) for problem in chosen] for s in range(turns)]
    ids = [problem.id for problem in chosen]
    asked_problems = [shown[int(place)] for place in asked.kept]
    return Suite(
        name=name,
        config=suite,
        ids=tuple(one for one, kept in zip(ids, whole, strict=True) if kept),
        tokens=asked.tokens,
        num_tokens=asked.num_tokens,
        prompt_of=prompt_of[:, whole],
        kinds=tuple(problem.kind for problem in asked_problems),
        letters=np.array(letters)[:, whole],
        verifier=AnswerVerifier(asked_problems, tokenizer, grader),
        dropped=tuple(one for one, kept in zip(ids, whole, strict=True) if not kept),
        levels={},
        made_with=_made_with(
            suite,
            config,
            tokenizer,
            grader,
            asked.tokens,
            asked.num_tokens,
            prompt_of[0, whole],
            asked_problems,
        ),
        seed=config.seed,
        stop_ids=tokenizer.stop_ids,
    )


def _letters(problem: Problem, seed: int, sample: int) -> str:
    order = permuted(problem, seed=seed, sample=sample).order
    return "".join(string.ascii_uppercase[place] for place in order)


def _held_out(
    name: str, suite: SuiteConfig, config: EvaluationConfig, tokenizer: Tokenizer,
    held_out: Split | None, grader: GraderPool,
) -> Suite:  # fmt: skip
    if held_out is None:
        raise EvaluationError(
            f"suites.{name} has no source, so it is the held-out problems of a run's own task: "
            "name the run with --checkpoint, or give the suite a source"
        )
    prompts, verifier = held_out.prompts, held_out.verifier
    count = len(prompts)
    problems: list[Problem] = []
    if isinstance(verifier, AnswerVerifier):
        verifier = dataclasses.replace(verifier, grader=grader)
        problems = [verifier.problems[place] for place in range(count)]
    ids = [problem.id for problem in problems]
    if len(set(ids)) < count:  # none, or of several sets that number their problems
        ids = [str(place) for place in range(count)]
    every = np.arange(count)
    return Suite(
        name=name,
        config=suite,
        ids=tuple(ids),
        tokens=prompts.tokens,
        num_tokens=prompts.num_tokens,
        prompt_of=every[None],
        kinds=tuple(problem.kind for problem in problems),
        letters=np.full((1, count), ""),
        verifier=verifier,
        dropped=(),
        levels={
            one: prompts.called.names[int(level)]
            for one, level in zip(ids, prompts.levels, strict=True)
        },
        made_with=_made_with(
            suite,
            config,
            tokenizer,
            grader if problems else None,
            prompts.tokens,
            prompts.num_tokens,
            every,
            problems,
        ),
        seed=config.seed,
        stop_ids=tokenizer.stop_ids,
    )


def _made_with(
    suite: SuiteConfig, config: EvaluationConfig, tokenizer: Tokenizer, grader: GraderPool | None,
    tokens: np.ndarray, num_tokens: np.ndarray, first: np.ndarray, problems: Sequence[Problem],
) -> dict[str, Any]:  # fmt: skip
    """grader: None for a verifier of the task's own. first: the prompt of each problem's first
    sample."""
    digest = hashlib.blake2b(digest_size=8)
    for row in first:
        digest.update(np.asarray(tokens[row, : num_tokens[row]], "<i4").tobytes())
        told = (problems[row].id, problems[row].answer, problems[row].kind) if problems else ()
        digest.update("\0".join(("", *told, "")).encode(errors="surrogatepass"))
    return {
        "seed": config.seed,
        "temperature": suite.temperature,
        "top_p": suite.top_p,
        "top_k": suite.top_k,
        "max_response_tokens": suite.max_response_tokens,
        "deadline_s": None if grader is None else grader.deadline,
        "stop_ids": list(tokenizer.stop_ids),
        "questions": digest.hexdigest(),
    }
