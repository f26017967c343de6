"""How the token losses of a batch become one number.

    loss = sum of token_scale * token loss over the trainable tokens
         / sum of token_share over the tokens that the denominator counts (`guards.py`)

Both sums run over the whole optimiser batch, however it is split. num_trainable is that of the
token's response, so a packed row gives what padded rows give. A response of which a guard counts
only some tokens adds only that part of its share.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def _ones(num_trainable: Int[Array, "B T"]) -> Float[Array, "B T"]:
    return (jnp.asarray(num_trainable) > 0).astype(jnp.float32)


def _inverse(num_trainable: Int[Array, "B T"]) -> Float[Array, "B T"]:
    num_trainable = jnp.asarray(num_trainable, jnp.float32)
    return jnp.where(num_trainable > 0, 1.0 / jnp.maximum(num_trainable, 1.0), 0.0)


@dataclasses.dataclass(frozen=True)
class TokenMean:
    """Every token of the batch counts alike, so long responses weigh more.

    Source: DAPO (2503.14476), eq. 12; S3AC (2610.35518).
    """

    def token_scale(self, num_trainable: Int[Array, "B T"]) -> Float[Array, "B T"]:
        """1, without unit; 0 where num_trainable is 0.

        Source: DAPO (2503.14476), eq. 12.
        """
        return _ones(num_trainable)

    def token_share(self, num_trainable: Int[Array, "B T"]) -> Float[Array, "B T"]:
        """1, in tokens; 0 where num_trainable is 0.

        Source: DAPO (2503.14476), eq. 12.
        """
        return _ones(num_trainable)


@dataclasses.dataclass(frozen=True)
class ResponseMean:
    """Mean over responses of the mean over each one's tokens, so all responses weigh alike.

    Source: GRPO (2402.03300), eq. 3; FlashREINFORCE (public code, 2026-09).
    """

    def token_scale(self, num_trainable: Int[Array, "B T"]) -> Float[Array, "B T"]:
        """1 / T_i for a response of T_i trainable tokens, per token; 0 where T_i is 0.

        Source: GRPO (2402.03300), eq. 3.
        """
        return _inverse(num_trainable)

    def token_share(self, num_trainable: Int[Array, "B T"]) -> Float[Array, "B T"]:
        """1 / T_i, in responses: the T_i tokens of a response add up to 1; 0 where T_i is 0.

        Source: GRPO (2402.03300), eq. 3.
        """
        return _inverse(num_trainable)


@dataclasses.dataclass(frozen=True)
class ConstantLength:
    """Mean over responses of the sum over each one's tokens divided by the constant `length`.

    length: tokens, in use the limit on a response. Raises ValueError unless a positive integer.

    Source: Dr.GRPO (2503.20783), without the length bias of 1 / T_i.
    """

    length: int

    def __post_init__(self):
        if not (isinstance(self.length, int) and self.length > 0):
            raise ValueError(f"length must be a positive integer, got {self.length!r}")

    def token_scale(self, num_trainable: Int[Array, "B T"]) -> Float[Array, "B T"]:
        """1 / length, per token; 0 where num_trainable is 0.

        Source: Dr.GRPO (2503.20783).
        """
        return _ones(num_trainable) / self.length

    def token_share(self, num_trainable: Int[Array, "B T"]) -> Float[Array, "B T"]:
        """1 / T_i, in responses: the T_i tokens of a response add up to 1; 0 where T_i is 0.

        Source: Dr.GRPO (2503.20783): the sum is still divided by the number of responses.
        """
        return _inverse(num_trainable)


Average = TokenMean | ResponseMean | ConstantLength
