"""The best explained variance that any critic can reach on the hasty writer of the tiny task.

  python benchmarks/critic_ceiling.py

Exact, from the process: V(s) is the chance of a right answer given all that is written so far,
weighted by how often each token is written; compared for the quit rate of the config, which rises
with the problem's length, and for constant ones.
"""

import numpy as np

from s3ac_jax.config.run import SftConfig
from s3ac_jax.config.tasks import Ladder
from s3ac_jax.data.arithmetic import quit_rates

GUESS = 0.1


def explained_variance(rates: np.ndarray) -> tuple[float, float]:
    """1 - E[Var(R | s)] / Var(R) over response tokens, R in {0, 1}, and the mean accuracy.

    rates: chance of giving up after a step, for problems of 1, 2, ... steps.
    """
    tokens = total = square = accuracy = 0.0
    for steps, rate in enumerate(rates, start=1):
        hazard = np.full(steps + 1, rate)
        hazard[[0, steps]] = 0.0  # at least one step, and no giving up once all are written
        chance = np.ones(steps + 1)  # chance[k]: of a right answer with k steps written
        for k in range(steps - 1, -1, -1):
            chance[k] = hazard[k] * GUESS + (1 - hazard[k]) * chance[k + 1]
        accuracy += chance[0] / len(rates)
        reach = 1.0
        visits = []  # (how often, V) of each token; the one that decides is read before it
        for k in range(steps):
            visits += [(reach, chance[k]), (3 * reach * (1 - hazard[k]), chance[k + 1])]
            gave_up = reach * hazard[k]
            visits += [(gave_up, GUESS), (gave_up * GUESS, 1.0), (gave_up * (1 - GUESS), 0.0)]
            reach *= 1 - hazard[k]
        visits.append((3 * reach, 1.0))
        for weight, value in visits:
            tokens, total, square = (
                tokens + weight, total + weight * value, square + weight * value**2,
            )  # fmt: skip
    mean = total / tokens
    return (square / tokens - mean**2) / (mean * (1 - mean)), accuracy


if __name__ == "__main__":
    sft, lengths = SftConfig(), np.arange(1, Ladder().max_steps + 1)
    cases = {
        f"min({sft.quit_most}, {sft.quit_slope} (n - 1))": quit_rates(
            lengths, slope=sft.quit_slope, most=sft.quit_most
        )
    }
    cases |= {f"{rate} at every length": np.full(len(lengths), rate) for rate in (0.2, 0.4, 0.6)}
    for name, rates in cases.items():
        explained, accuracy = explained_variance(np.asarray(rates, float))
        print(f"quit rate {name}: explained variance {explained:.2f}, accuracy {accuracy:.2f}")
