"""The search for what still fits, with a rule in place of a compiler."""

import pytest

from s3ac_jax.train.plan.search import largest


@pytest.mark.parametrize(
    ("start", "unit", "most", "limit", "want"),
    [
        (16, 16, 128, 1000, 128),  # all fit: the largest that makes sense
        (16, 16, 128, 70, 64),
        (16, 16, 4096, 16, 16),
        (64, 16, 4096, 40, 32),  # the config's own does not fit
        (64, 16, 4096, 8, None),
    ],
)
def test_the_largest_that_fits(start, unit, most, limit, want):
    asked = []

    def fits(value):
        asked.append(value)
        return value <= limit

    assert largest(start, unit, most, fits, tries=20) == want
    assert len(set(asked)) == len(asked)
    assert all(value % unit == 0 for value in asked)


def test_tries_are_few():
    asked = []
    largest(1, 1, 10**6, lambda value: asked.append(value) or value < 777, tries=6)
    assert len(asked) == 6
