"""What the tests of kept responses share: a tick in two halves and the prompts that it asks."""

import numpy as np

from s3ac_jax.core.types import ActorBatch
from s3ac_jax.data.packing import pack
from s3ac_jax.data.prompts import Levels, PromptSet
from tests.unit.train.small import PROMPTS, nine, random_scores

HALVES = ([2, 0, 7, 3], [8, 6, 1, 5])  # response 4 is not there


def prompt_set():
    """Nine prompts, those of `nine`; the level of each is its length."""
    prompt = nine().rollout.prompt
    names = {n: f"steps_{n}" for n in range(1, 7)}
    called = Levels("steps", names, names)
    return PromptSet(prompt.tokens, prompt.num_tokens, np.array(PROMPTS), called)


def tick_of(values=True):
    """(packed, scores, actor batches) of a batch in two halves."""
    parts = [pack(nine(), np.array(rows), pack_tokens=18, max_rows=4) for rows in HALVES]
    scores, actor = [], []
    for seed, part in enumerate(parts):
        logp, v = random_scores(part, seed)
        scores.append((logp, v if values else None))
        rng = np.random.default_rng(10 + seed)
        advantages, weights = rng.normal(size=(2, *part.mask.shape)).astype(np.float32)
        actor.append(ActorBatch(part, logp, advantages, weights, None, np.float32(1)))
    return parts, scores, actor
