"""Reading log-probs and values, without gradients: before an update, and of prompts alone."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from s3ac_jax.core import segments
from s3ac_jax.core.types import Packed, PyTree
from s3ac_jax.models.network import Network
from s3ac_jax.models.token_logp import before, token_logp
from s3ac_jax.parallel.layout import flatten, unflatten
from s3ac_jax.train import micro


def read_logp(
    actor: Network, params: PyTree, packed: Packed, *, temperature: float
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """log pi(token | tokens before it) and the entropy there, aligned to the token, in nats.

    The one door to the policy's log-probs: pi_old and pi pass through it alike, with the experts
    that the sampler recorded.
    Source: S3AC (2610.35518), value convention, applied to the policy as well; Rollout routing
    replay (2510.11370).
    """
    model = actor.bind(params)
    hidden, _ = model(packed.tokens, packed.positions, packed.segment_ids, routing=packed.routing)
    read = token_logp(
        flatten(before(hidden)), model.head(), flatten(packed.tokens), temperature=temperature
    )
    logp, entropy = (unflatten(x, packed.tokens.shape) for x in read)
    return logp, entropy


def read_values(critic: Network, params: PyTree, packed: Packed) -> Float[Array, "B T"]:
    """V(s_t), read before token t, aligned to the token.

    Source: S3AC (2610.35518), value convention.
    """
    model = critic.bind(params)
    return before(model(packed.tokens, packed.positions, packed.segment_ids))


def make_score(
    actor: Network, critic: Network | None, *, temperature: float, micro_rows: int
) -> Callable[[PyTree, PyTree, Packed], tuple[Array, Array | None]]:
    """score(actor params, critic params, packed) -> (logp_old, values_old), both [R, T].

    Without a critic network no values are read: None in their place, and critic params aren't
    looked at.
    Source: S3AC (2610.35518), order of one step: pi_old and V_old before any update.
    """

    @jax.jit
    def score(actor_params: PyTree, critic_params: PyTree, packed: Packed):
        def read(part: Packed):
            logp, _ = read_logp(actor, actor_params, part, temperature=temperature)
            values = None if critic is None else read_values(critic, critic_params, part)
            return logp, values

        return micro.per_token(read, packed, packed.rows, micro_rows)

    return score


def make_values(
    critic: Network, *, micro_rows: int
) -> Callable[[PyTree, Packed], Float[Array, "B T"]]:
    """values(critic params, packed) -> V(s_t), [R, T]. Source: S3AC (2610.35518)."""

    @jax.jit
    def values(params: PyTree, packed: Packed):
        return micro.per_token(
            lambda part: read_values(critic, params, part), packed, packed.rows, micro_rows
        )

    return values


def make_drift(
    actor: Network, *, temperature: float, micro_rows: int, num_responses: int
) -> Callable[[PyTree, list[Packed]], Float[Array, "N"]]:
    """drift(actor params, packed list) -> mean |log pi - log mu| of each response, nats per token.

    NaN for a response that is not in the batch. mu: the log-probs that the responses came with.
    Source: SPO (2509.13232): how far the policy has moved since it last answered a prompt.
    """

    @jax.jit
    def drift(params: PyTree, packed: list[Packed]) -> Float[Array, "N"]:
        found = jnp.full(num_responses + 1, jnp.nan)
        for batch in packed:
            logp = micro.per_token(
                lambda part: read_logp(actor, params, part, temperature=temperature)[0],
                batch, batch.rows, micro_rows,
            )  # fmt: skip
            moved = jnp.abs(logp - batch.logp_rollout)
            owner = jnp.where(batch.mask, batch.response, num_responses)
            # Set, not added: every token of a response brings the same mean, in any order.
            mean = segments.segment_mean(moved, batch.segment_ids, batch.mask)
            found = found.at[owner].set(mean)
        return found[:num_responses]

    return drift


def make_prompt_values(
    critic: Network,
) -> Callable[[PyTree, Int[Array, "P T"], Int[Array, "P"]], Float[Array, "P"]]:
    """values(critic params, prompt tokens, lengths) -> V(s_0) of right-padded prompts.

    Source: S3AC (2610.35518), DAPS: V(s_0) at the last prompt token, before anything is sampled.
    """

    @jax.jit
    def values(params: PyTree, tokens: Int[Array, "P T"], lengths: Int[Array, "P"]):
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        segment_ids = (places < lengths[:, None]).astype(jnp.int32)
        read = critic.bind(params)(tokens, places, segment_ids)
        return jnp.take_along_axis(read, lengths[:, None] - 1, axis=1)[:, 0]

    return values
