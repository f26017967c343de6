"""Terms added to the verifier's reward."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def soft_overlong_penalty(
    num_tokens: Int[Array, "..."], *, max_tokens: int, buffer_tokens: int
) -> Float[Array, "..."]:
    """0 up to max_tokens - buffer_tokens, then linear down to -1 at max_tokens, -1 beyond.

        penalty = (max - buffer - l) / buffer, within [-1, 0], for a response of l tokens

    In reward units, float32 whatever num_tokens is: add it into a float32 reward, since an integer
    buffer would turn -0.37 into 0. Raises ValueError unless 0 < buffer_tokens <= max_tokens.

    Source: DAPO (2503.14476), eq. 13.
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(
            f"buffer_tokens must be in 1..max_tokens, got {buffer_tokens} of {max_tokens}"
        )
    # float32 before the difference: lengths in an unsigned type would wrap around below 0.
    num_tokens = jnp.asarray(num_tokens, jnp.float32)
    return jnp.clip((max_tokens - buffer_tokens - num_tokens) / buffer_tokens, -1.0, 0.0)
