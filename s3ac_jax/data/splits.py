"""Which problems a training set may not hold, by the problems themselves."""

import numpy as np


def held_out_by_hash(codes: np.ndarray, share: float) -> np.ndarray:
    """True for about this share of all codes (uint64), [P].

    Source: splitmix64 (Steele, Lea, Flood 2014) as the hash; ours: the split is a property of the
    problem, so that train and held-out sets are disjoint whatever seeds made them.
    """
    x = codes + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) % np.uint64(1000) < np.uint64(1000 * share)
