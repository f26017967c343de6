"""From a run's config to its task: prompts, verifier, tokenizer. Here, and nowhere else."""

import dataclasses
import hashlib
from typing import Any, Protocol

import numpy as np

from s3ac_jax.config import tasks as configs
from s3ac_jax.config.run import RunConfig
from s3ac_jax.core.types import Prompt, Rollout, Scored
from s3ac_jax.data import arithmetic, sums
from s3ac_jax.data.chat import ChatTemplate, load_template
from s3ac_jax.data.hf_tokenizer import HFTokenizer
from s3ac_jax.data.mixing import Mixture
from s3ac_jax.data.prompts import PromptSet, arithmetic_prompts, sums_prompts
from s3ac_jax.data.stream import Epochs, PromptStream
from s3ac_jax.data.tokenizer import Tokenizer
from s3ac_jax.rewards.arithmetic import ArithmeticVerifier
from s3ac_jax.rewards.pool import GraderPool
from s3ac_jax.rewards.sums import SumsVerifier
from s3ac_jax.rewards.verifier import Verifier


@dataclasses.dataclass(frozen=True)
class Split:
    """One half of the task: prompts and the verifier of their responses. Source: ours."""

    prompts: PromptSet
    verifier: Verifier

    def facts(self) -> dict[str, list[Any]]:
        """{level: [prompts, digest]}: which questions these are, in which order, with which
        answers. Levels are sources where there are several.

        Source: ours: histories and cursors speak of prompts by their numbers.
        """
        prompts, golds = self.prompts, getattr(self.verifier, "problems", ())
        facts = {}
        for level in np.unique(prompts.levels):
            rows = np.flatnonzero(prompts.levels == level)
            digest = hashlib.blake2b(digest_size=8)
            for row in rows:
                ids = prompts.tokens[row, : prompts.num_tokens[row]]
                digest.update(np.asarray([row, len(ids), *ids], "<i4").tobytes())
                if isinstance(golds, list):
                    told = f"{golds[row].answer}\0{golds[row].kind}\0"
                    digest.update(told.encode(errors="surrogatepass"))
            facts[prompts.called.names[int(level)]] = [len(rows), digest.hexdigest()]
        return facts


class Demonstrate(Protocol):
    """Right and hasty responses to training problems, in the shape of a rollout. Source: ours."""

    def __call__(
        self, rng: np.random.Generator, number: int, *, slope: float, most: float
    ) -> Scored:
        """`number` of them; slope, most: of the rate at which the writer gives up. Source: ours."""
        ...


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """The part of a task that an evaluation needs; fields as in `Task`. Source: ours."""

    tokenizer: Tokenizer
    split: Split
    template: ChatTemplate | None = None
    grader: GraderPool | None = None

    def close(self) -> None:
        """Ends the grader's processes. Source: ours."""
        if self.grader is not None:
            self.grader.close()


@dataclasses.dataclass(frozen=True)
class Task:
    """What is asked. train and held_out share no problem.

    demonstrate: what a warm start learns from, None for a task that has none. template: what the
    prompts were put through, None for none. grader: of answers, None for a task that needs none.
    sets: sizes and weights of the sets that training mixes, in their order; empty for one.
    notes: lines for people on what was left out.
    Source: ours.
    """

    tokenizer: Tokenizer
    train: Split
    held_out: Split
    demonstrate: Demonstrate | None = None
    template: ChatTemplate | None = None
    grader: GraderPool | None = None
    sets: tuple[tuple[int, float], ...] = ()
    notes: tuple[str, ...] = ()

    def stream(self, seed: int, *, ranked: bool = False) -> PromptStream:
        """The order of the training prompts. ranked: for a selection that takes the best of many.

        Raises ValueError where sets have weights that such a selection can't heed.
        Source: ours.
        """
        if len(self.sets) < 2:
            return Epochs(len(self.train.prompts), seed)
        sizes, weights = zip(*self.sets, strict=True)
        if not ranked:
            return Mixture(sizes, weights, seed)
        # Among the places of a mixture a prompt of a small set comes often, and others not at all.
        if len(set(weights)) > 1:
            raise ValueError(
                "recipe.select takes the best of its candidates, whatever source they are of: give "
                f"all sources of task.train the same weight, got {list(weights)}"
            )
        return Epochs(len(self.train.prompts), seed)

    def facts(self) -> dict[str, dict[str, list[Any]]]:
        """{"train": ..., "held_out": ...}: see `Split.facts`. Source: ours."""
        return {"train": self.train.facts(), "held_out": self.held_out.facts()}

    def close(self) -> None:
        """Ends the grader's processes. Source: ours."""
        if self.grader is not None:
            self.grader.close()


def make_task(config: RunConfig) -> Task:
    """The task of this run.

    Raises ValueError when the prompt sets can't be had, or the model can't give every token of the
    tokenizer; TokenizerError when the folder's tokenizer or chat template can't be used;
    ProblemsError when questions can't be read.
    Source: ours.
    """
    match config.task:
        case configs.Ladder():
            return _ladder(config.task)
        case configs.Sums():
            return _sums(config.task, config)
        case configs.Questions():
            # Not above: it makes a Task.
            from s3ac_jax.train.questions import question_task

            return question_task(config.task, config)


def held_out_half(config: RunConfig) -> HeldOut:
    """What `make_task` gives, without reading a training set that may be large or elsewhere.

    Raises as `make_task`. Source: ours.
    """
    if isinstance(config.task, configs.Questions):
        from s3ac_jax.train.questions import held_out_questions

        return held_out_questions(config.task, config)
    task = make_task(config)
    return HeldOut(task.tokenizer, task.held_out, task.template, task.grader)


def _ladder(config: configs.Ladder) -> Task:
    def split(number: int, held_out: bool) -> Split:
        problems = arithmetic.make_problems(
            config.seed, number, max_steps=config.max_steps, held_out=held_out
        )
        return Split(arithmetic_prompts(problems), ArithmeticVerifier(problems))

    def demonstrate(rng: np.random.Generator, number: int, *, slope: float, most: float) -> Scored:
        problems = arithmetic.draw_training_problems(rng, number, max_steps=config.max_steps)
        rates = arithmetic.quit_rates(problems.num_steps, slope=slope, most=most)
        prompt_tokens, num_prompt = arithmetic.prompt_tokens(problems)
        tokens, num_tokens = arithmetic.demonstrations(problems, rng, quit_rate=rates)
        yes, index = np.ones(number, bool), np.arange(number, dtype=np.int32)
        prompt, logp = Prompt(index, prompt_tokens, num_prompt), np.zeros(tokens.shape, np.float32)
        version = np.zeros(tokens.shape, np.int32)
        rollout = Rollout(prompt, tokens, num_tokens, logp, yes, version)
        return Scored(rollout, np.ones(number, np.float32), yes, yes)

    return Task(
        arithmetic.TOKENIZER, split(config.num_train, False), split(config.num_held_out, True),
        demonstrate,
    )  # fmt: skip


def _sums(config: configs.Sums, run: RunConfig) -> Task:
    tokenizer = HFTokenizer(run.start.hf)
    check_vocabulary(tokenizer, run)
    template = load_template(run.start.hf, tokenizer)

    def split(number: int, held_out: bool) -> Split:
        problems = sums.make_sums(
            config.seed, number, digits=config.digits, operators=config.operators,
            num_wordings=len(config.wordings), held_out=held_out,
        )  # fmt: skip
        prompts = sums_prompts(
            problems, tokenizer, template, wordings=config.wordings, system=config.system,
            thinking=config.thinking, max_tokens=config.max_prompt_tokens,
        )  # fmt: skip
        return Split(prompts, SumsVerifier(problems, tokenizer))

    return Task(
        tokenizer, split(config.num_train, False), split(config.num_held_out, True),
        template=template,
    )  # fmt: skip


def check_vocabulary(tokenizer: Tokenizer, run: RunConfig) -> None:
    """Raises ValueError when the model can't give every token of the tokenizer. Source: ours."""
    if tokenizer.vocab_size > run.model.vocab_size:
        whose = run.start.hf or "UTF-8, which a task without start.hf is written in"
        raise ValueError(
            f"model.vocab_size must be at least {tokenizer.vocab_size}, the tokens of {whose}, got "
            f"{run.model.vocab_size}"
        )
