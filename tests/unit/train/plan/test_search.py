"""The search for what still fits, with a rule in place of a compiler."""

import dataclasses

import pytest

from s3ac_jax.parallel.mesh import MeshSpec
from s3ac_jax.train.plan import search as searching
from s3ac_jax.train.plan.search import largest, row_unit, search
from tests.helpers import run_config


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


def on(mesh, pack_tokens):
    config = run_config(pack_tokens=pack_tokens)
    rollout = dataclasses.replace(config.rollout, slots=mesh.num_devices)
    return dataclasses.replace(config, mesh=mesh, rollout=rollout)


def test_nothing_below_the_least_is_tried():
    asked = []
    assert largest(64, 8, 4096, lambda value: asked.append(value) or False, least=35) is None
    assert asked == [64, 40]


@pytest.mark.parametrize(
    ("pack_tokens", "mesh", "unit"),
    [
        (64, MeshSpec(), 64),
        (32768, MeshSpec(), 1024),
        (32768, MeshSpec(context=2), 2048),
        (3072, MeshSpec(context=3), 3072),
        # A part of 192 is three times 64, and so is every other of its kind a multiple of that.
        (384, MeshSpec(context=2), 128),
    ],
)
def test_rows_change_in_steps_that_the_mesh_divides(pack_tokens, mesh, unit):
    config = on(mesh, pack_tokens)
    assert row_unit(config) == unit
    assert pack_tokens % unit == 0


def test_short_rows_and_odd_meshes_are_searched_from_the_config_on(monkeypatch):
    """The config itself is tried first; no config is made that would be refused."""
    config = on(MeshSpec(context=3), 72)
    tried = []
    monkeypatch.setattr(
        searching, "trains", lambda config, *_: tried.append(config.train) or config.longest < 100
    )
    found = search(config, None, {})
    rows = [one.pack_tokens for one in tried if one.micro_rows == 1]
    assert rows[0] == 72
    assert found["train.pack_tokens"] == max(rows) > 72
    assert all(one % 3 == 0 for one in rows)


def test_tries_are_few():
    asked = []
    largest(1, 1, 10**6, lambda value: asked.append(value) or value < 777, tries=6)
    assert len(asked) == 6
