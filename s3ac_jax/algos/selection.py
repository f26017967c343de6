"""The `select` column: which prompts are worth drawing.

Two ways of drawing. `Accepting` columns meet prompts in turn and accept each with a probability of
its own. `Ranking` columns look at a pool and take the best by `priority`. Both read V(s_0) (if
`reads_values`) and each prompt's history (S, N) as of now.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from s3ac_jax.algos import difficulty, tracker


class _History:
    """A history that nothing ages and that starts from nothing."""

    tracks_drift: ClassVar[bool] = False

    def start(
        self, successes: Float[Array, "P"], samples: Int[Array, "P"]
    ) -> tuple[Float[Array, "P"], Float[Array, "P"]]:
        """(S, N) before training: none, whatever reference rollouts found.

        Source: ours.
        """
        return jnp.zeros(jnp.shape(successes)), jnp.zeros(jnp.shape(successes))

    def aged(
        self,
        successes: Float[Array, "P"],
        attempts: Float[Array, "P"],
        steps_since: Int[Array, "P"],
        drift: Float[Array, "P"],
    ) -> tuple[Float[Array, "P"], Float[Array, "P"]]:
        """(S, N) as they are.

        Source: ours: nothing reads the age of the history.
        """
        return successes, attempts


@dataclasses.dataclass(frozen=True)
class Uniform(_History):
    """Every prompt is drawn when its turn comes.

    Source: ours: the baseline that selection has to beat.
    """

    reads_values: ClassVar[bool] = False

    def acceptance(
        self, value: Float[Array, "P"], successes: Float[Array, "P"], attempts: Float[Array, "P"]
    ) -> Float[Array, "P"]:
        """1 for each prompt.

        Source: ours: no selection.
        """
        return jnp.ones(jnp.shape(value), jnp.float32)


@dataclasses.dataclass(frozen=True)
class Daps(_History):
    """Difficulty-adaptive selection. n_c: attempts that the critic's word is worth.

    Source: S3AC (2610.35518), DAPS; ours: n_c and decay.
    """

    n_c: float = 4.0
    a_min: float = 0.1
    decay: float = 0.99
    reads_values: ClassVar[bool] = True

    def __post_init__(self):
        if not self.n_c >= 0:
            raise ValueError(f"n_c must not be negative, got {self.n_c}")
        for name in ("a_min", "decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in 0..1, got {getattr(self, name)}")
        if self.a_min == self.n_c == 0:
            raise ValueError("with a_min and n_c both 0 no prompt might ever be accepted")

    def acceptance(
        self, value: Float[Array, "P"], successes: Float[Array, "P"], attempts: Float[Array, "P"]
    ) -> Float[Array, "P"]:
        """Probability of drawing each prompt, from V(s_0) and its decayed history.

        Source: S3AC (2610.35518), DAPS.
        """
        p = difficulty.fuse(difficulty.success_prior(value), successes, attempts, n_c=self.n_c)
        return difficulty.acceptance(p, a_min=self.a_min)

    def aged(
        self,
        successes: Float[Array, "P"],
        attempts: Float[Array, "P"],
        steps_since: Int[Array, "P"],
        drift: Float[Array, "P"],
    ) -> tuple[Float[Array, "P"], Float[Array, "P"]]:
        """(S, N) as of now; drift is not read.

        Source: ours: lazy decay, see `decay_history`.
        """
        return difficulty.decay_history(successes, attempts, steps_since, decay=self.decay)


@dataclasses.dataclass(frozen=True)
class Pcl(_History):
    """Of pool_factor times as many prompts, those whose predicted success is nearest to tau.

    Source: PCL (2510.01135): k = 4, tau = 0.5 in success probability.
    """

    pool_factor: int = 4
    tau: float = 0.5
    reads_values: ClassVar[bool] = True

    def __post_init__(self):
        if self.pool_factor < 1:
            raise ValueError(f"pool_factor must be at least 1, got {self.pool_factor}")
        if not 0 <= self.tau <= 1:
            raise ValueError(f"tau must be in 0..1, got {self.tau}")

    def pool(self, batch_prompts: int, num_prompts: int) -> int:
        """Prompts to look at for a batch of `batch_prompts`.

        Source: PCL (2510.01135), k m.
        """
        return min(self.pool_factor * batch_prompts, num_prompts)

    def priority(
        self,
        key: PRNGKeyArray,
        value: Float[Array, "P"],
        successes: Float[Array, "P"],
        attempts: Float[Array, "P"],
    ) -> Float[Array, "P"]:
        """-|V - tau| in success probability; the key and the history are not read.

        Source: PCL (2510.01135).
        """
        return -difficulty.distance_to(difficulty.success_prior(value), tau=self.tau)


@dataclasses.dataclass(frozen=True)
class Spo(_History):
    """Prompts by the uncertainty of their tracker, drawn without replacement from the whole set.

    n_0: counts that the start is worth. half_life: nats per token of drift that halve the
    history, within low..high. floor: weight of a prompt that is surely solved or surely not.
    Source: SPO (2509.13232).
    """

    n_0: float = 8.0
    half_life: float = 0.06
    low: float = 0.875
    high: float = 0.96
    floor: float = 0.05
    reads_values: ClassVar[bool] = False
    tracks_drift: ClassVar[bool] = True

    def __post_init__(self):
        for name in ("n_0", "half_life", "floor"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"must be 0 <= low <= high <= 1, got {self.low}, {self.high}")

    def pool(self, batch_prompts: int, num_prompts: int) -> int:
        """The whole set.

        Source: SPO (2509.13232).
        """
        return num_prompts

    def priority(
        self,
        key: PRNGKeyArray,
        value: Float[Array, "P"],
        successes: Float[Array, "P"],
        attempts: Float[Array, "P"],
    ) -> Float[Array, "P"]:
        """log weight plus Gumbel noise: the largest are a draw without replacement.

        Source: SPO (2509.13232), prioritised sampling; Gumbel-top-k (Kool 2019, 1903.06059).
        """
        v = successes / jnp.where(attempts > 0, attempts, 1.0)
        weight = tracker.sampling_weight(jnp.where(attempts > 0, v, 0.5), floor=self.floor)
        return jnp.log(weight) + jax.random.gumbel(key, jnp.shape(value))

    def start(
        self, successes: Float[Array, "P"], samples: Int[Array, "P"]
    ) -> tuple[Float[Array, "P"], Float[Array, "P"]]:
        """(S, N) before training, from reference rollouts: Beta counts (a_0, a_0 + b_0).

        Source: SPO (2509.13232), initialisation.
        """
        a_0, b_0 = tracker.initial_counts(successes, samples, n_0=self.n_0)
        return a_0, a_0 + b_0

    def aged(
        self,
        successes: Float[Array, "P"],
        attempts: Float[Array, "P"],
        steps_since: Int[Array, "P"],
        drift: Float[Array, "P"],
    ) -> tuple[Float[Array, "P"], Float[Array, "P"]]:
        """(S, N) with the past forgotten as far as the policy has moved; NaN drift forgets nothing.

        Source: SPO (2509.13232), KL-adaptive forgetting.
        """
        factor = tracker.forgetting(drift, half_life=self.half_life, low=self.low, high=self.high)
        return successes * factor, attempts * factor


Accepting = Uniform | Daps
Ranking = Pcl | Spo
Select = Accepting | Ranking
