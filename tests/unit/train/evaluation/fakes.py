"""A policy whose answers follow from its seed and its prompt, and questions for it."""

import json

import numpy as np

from s3ac_jax.core.types import Rollout, Scored
from s3ac_jax.data.prompts import Levels, PromptSet
from s3ac_jax.data.tokenizer import ByteTokenizer
from s3ac_jax.train.tasks import Split

TOKENIZER = ByteTokenizer()


def said(seed, prompt):
    """The made-up response: a number in a box, one time in four cut off; another, none at all."""
    number = (int(seed) + len(prompt)) % 5
    match seed % 8:
        case 0 | 1:
            return "cut off \\boxed{3}", False
        case 2:
            return "no idea", True
    return f"so \\boxed{{{number}{'.0' * (int(seed) % 2)}}}", True


class FakePolicy:
    """A backend. asked: seeds of every request so far. aborts: the next answer is cut short."""

    def __init__(self, width=24):
        self.width = width
        self.asked, self.prompts, self.calls, self.aborts = [], [], 0, False

    def generate(self, prompt, sampling, *, keep_routing=True):
        assert keep_routing is False
        rows, self.calls = len(prompt.num_tokens), self.calls + 1
        tokens = np.zeros((rows, self.width), np.int32)
        lengths, stopped = np.zeros(rows, np.int32), np.zeros(rows, bool)
        for n, seed in enumerate(sampling.seed):
            shown = TOKENIZER.decode(prompt.tokens[n, : prompt.num_tokens[n]].tolist())
            text, stopped[n] = said(int(seed), shown)
            ids = [*TOKENIZER.encode(text), *([1] if stopped[n] else [])]
            tokens[n, : len(ids)], lengths[n] = ids, len(ids)
            self.asked.append(int(seed))
            self.prompts.append(shown)
        version = np.zeros(tokens.shape, np.int32)
        aborted = np.ones(rows, bool) if self.aborts else None
        logp = np.zeros(tokens.shape, np.float32)
        return Rollout(prompt, tokens, lengths, logp, stopped, version, aborted=aborted)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def questions(path, count=5):
    """Problems whose answers are 0..4 in turn."""
    return write(
        path,
        [{"id": f"q{n}", "prompt": "?" * (n + 1), "answer": str(n % 5)} for n in range(count)],
    )


class Even:
    """A task's own verifier: right when the response has an even number of tokens."""

    def grade(self, rollout):
        success = rollout.num_tokens % 2 == 0
        return Scored(rollout, np.where(success, 1.0, -1.0), success, np.ones(len(success), bool))


def of_a_run(verifier, prompts=("1+1=", "2+2="), levels=(0, 0)):
    ids = np.array([TOKENIZER.encode(text) for text in prompts], np.int32)
    called = Levels("level", {0: "low", 1: "high"}, {})
    lengths = np.full(len(ids), ids.shape[1])
    return Split(PromptSet(ids, lengths, np.array(levels), called), verifier)
