"""Which random key each stage of a run uses; ticks fold in their own number, from 0 on."""

import jax
from jaxtyping import PRNGKeyArray

# Beyond any tick, so that no stage shares a stream with one.
EVALUATION, VALUE_ROLLOUTS, CRITIC_START, REPORT, REFERENCE, JUDGE, ADAPTERS = range(
    2**31, 2**31 + 7
)


def stage_key(seed: int, stage: int) -> PRNGKeyArray:
    """The key of one stage of the run with this seed. Source: ours."""
    return jax.random.fold_in(jax.random.key(seed), stage)
