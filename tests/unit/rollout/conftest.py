"""The small sampler and what it made of the shared requests."""

import pytest

from tests.unit.rollout.rollouts import PROMPTS, TEMPERATURES, make_rollout, settings, trained


@pytest.fixture(scope="module")
def params():
    return trained()


@pytest.fixture(scope="module")
def room(params):
    return make_rollout(params)


@pytest.fixture(scope="module")
def mixed(room):
    return room.generate(PROMPTS, settings(11, temperature=TEMPERATURES))
