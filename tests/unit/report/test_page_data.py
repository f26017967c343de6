"""What the page reads of a run's files."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from s3ac_jax.models.network import actor_network
from s3ac_jax.report.page_data import (
    by_number,
    columns,
    differences,
    num_parameters,
    number,
    phases,
    read_runs,
)
from tests.helpers import tiny_spec
from tests.page_runs import TICKS, lines, responses, write_run


@pytest.fixture
def run(tmp_path):
    return read_runs([write_run(tmp_path)])[0]


def test_series_and_periods(run):
    ticks, values = run.series("value_loss")
    assert list(ticks) == list(range(TICKS))
    assert np.isnan(values).all()
    assert run.ticks == TICKS
    # A fifth of 0..9 is 1.8 ticks on either side.
    assert run.mean_between("explained_variance", run.periods()[0]) == pytest.approx(0.475)
    assert run.mean_between("explained_variance", run.periods()[1]) == pytest.approx(0.075)
    assert np.isnan(run.mean_between("unheard_of", run.periods()[0]))
    assert run.levels("accept/") == ["steps_2", "steps_10"]


def test_what_is_no_number_is_nan():
    assert [number(x) for x in (1, 0.5, -0.0)] == [1.0, 0.5, 0.0]
    assert all(np.isnan(number(x)) for x in (None, "1", [], float("inf"), float("nan")))


def test_levels_are_sorted_by_their_numbers():
    some = ["steps_10", "steps_2", "hard", "2_x", "steps_2_10", "steps_2_9"]
    assert sorted(some, key=by_number) == [
        "hard", "steps_2", "steps_2_9", "steps_2_10", "steps_10", "2_x"
    ]  # fmt: skip


def test_long_and_easy_are_relative_to_the_tick(run):
    read = columns(run)
    assert list(read.long[:6]) == [False, False, False, True, True, True]
    # Thirds of V(s_0) = 0.9, 0.5, 0.4, 0.3, -0.5, -0.9.
    assert list(read.easiness[:6]) == [2, 2, 1, 1, 0, 0]
    assert (read.tick == np.repeat(np.arange(TICKS), 6)).all()


def test_without_values_levels_say_what_is_easy(tmp_path):
    some = lines([responses(0) | {"v0": None}])
    read = columns(read_runs([write_run(tmp_path, **{"responses.jsonl": some})])[0])
    # steps_2 is right in two of three, steps_10 never.
    assert (read.easiness[::2] > read.easiness[1::2]).all()


def test_time_made_ahead_is_no_part_of_the_tick(run):
    assert phases(run) == {"rollout": 3.0 * TICKS, "critic": 1.0 * TICKS}
    ahead = [line | {"time/gather": 9.0, "time/wait": 0.5} for line in run.metrics]
    assert phases(dataclasses.replace(run, metrics=ahead)) == {"critic": 10.0, "wait": 5.0}


def test_differences_of_configs(run):
    config = json.loads(json.dumps(run.config))
    config["critic"]["lr"], config["new"] = 1e-3, {"a": 1, "b": 2}
    other = dataclasses.replace(run, config=config)
    assert differences([run, other]) == [
        ("critic.lr", ["0.00025", "0.001"]),
        ("new", ["-", "there"]),
    ]


@pytest.mark.parametrize("change", [{}, {"tie_embeddings": False, "qk_norm": True}])
def test_weights_are_those_of_the_model(change):
    spec = dataclasses.replace(tiny_spec(), **change)
    weights = sum(leaf.size for leaf in jax.tree.leaves(actor_network(spec).abstract))
    assert num_parameters({"model": dataclasses.asdict(spec)}) == weights


def test_weights_of_other_models_are_not_guessed():
    assert num_parameters({}) is None
    assert num_parameters({"model": {"moe": {"experts": 8}}}) is None
    assert num_parameters({"model": {"hidden_size": 8}}) is None
