"""How hard a prompt is now, and what that says for drawing it: DAPS and PCL."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def success_prior(value: Float[Array, "..."]) -> Float[Array, "..."]:
    """The critic's guess at the success rate, clip((V(s_0) + 1) / 2, 0, 1), a probability.

    Rewards are in {-1, +1}. NaN counts as 0.5: a broken critic selects uniformly.

    Source: S3AC (2610.35518), DAPS; ours: NaN.
    """
    value = jnp.asarray(value, jnp.float32)
    return jnp.where(jnp.isnan(value), 0.5, jnp.clip((value + 1.0) / 2.0, 0.0, 1.0))


def fuse(
    prior: Float[Array, "..."],
    successes: Float[Array, "..."],
    attempts: Float[Array, "..."],
    *,
    n_c: float,
) -> Float[Array, "..."]:
    """Success rate (S + n_c p_c) / (N + n_c), a probability; the prior is worth n_c attempts.

    With n_c = 0 and no attempts it is the prior.

    Source: S3AC (2610.35518) states the fusion; ours: the Beta posterior mean as its formula.
    """
    weight = jnp.asarray(attempts, jnp.float32) + n_c
    posterior = (jnp.asarray(successes, jnp.float32) + n_c * prior) / jnp.where(
        weight > 0, weight, 1.0
    )
    return jnp.where(weight > 0, posterior, prior)


def acceptance(p: Float[Array, "..."], *, a_min: float) -> Float[Array, "..."]:
    """Probability of drawing a prompt of success rate p: a_min + (1 - a_min) 4 p (1 - p).

    1 at p = 1/2, a_min at 0 and 1.

    Source: S3AC (2610.35518) gives V = -0.8 -> 0.42 and V = 0 -> 1; ours: the parabola.
    """
    p = jnp.asarray(p, jnp.float32)
    return a_min + (1.0 - a_min) * 4.0 * p * (1.0 - p)


def distance_to(p: Float[Array, "..."], *, tau: float) -> Float[Array, "..."]:
    """|p - tau|, how far a success rate is from the one aimed at; the smallest are drawn.

    Both are probabilities, not values. p comes from `success_prior` or `fuse`, which leave no NaN
    to upset a sort.

    Source: PCL (2510.01135), selection by |V - tau|; tau 0.5.
    """
    return jnp.abs(jnp.asarray(p, jnp.float32) - tau)


def decay_history(
    successes: Float[Array, "P"],
    attempts: Float[Array, "P"],
    steps_since: Int[Array, "P"],
    *,
    decay: float,
) -> tuple[Float[Array, "P"], Float[Array, "P"]]:
    """(S, N) decay^steps: the history of each prompt as of now, in decayed counts.

    steps_since: optimiser ticks since the counts were last written. Both counts shrink alike, so
    the success rate stays and only its weight against the critic fades.

    Source: ours: outcomes of old policies say less about the present one.
    """
    factor = jnp.power(jnp.float32(decay), jnp.asarray(steps_since, jnp.float32))
    return successes * factor, attempts * factor
