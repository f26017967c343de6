"""The story of a run in sentences: its numbers, and what it says where there are none."""

import dataclasses
import json
import math

import pytest

from s3ac_jax.algos.recipe import RECIPES
from s3ac_jax.config.boundary import recipe_dict
from s3ac_jax.report import story
from s3ac_jax.report.page_data import read_runs
from tests.page_runs import write_run


@pytest.fixture
def run(tmp_path):
    return read_runs([write_run(tmp_path)])[0]


def test_a_finished_run(run):
    what, time, outcome, critic, wires = story.sentences(run)
    assert what == (
        "A policy was trained on the task Ladder with Daps, LengthAdaptiveGae, Cispo, "
        "MismatchGuard and a critic (coverage pretraining): 10 of 10 ticks with 3 prompts of 2 "
        "responses each, 60 responses in all."
    )
    assert time == (
        "The ticks took 40 s, half of them 4.00 s or less (rollout 75 %, critic 25 %); before them "
        "came value pretraining 61 s, on 1 cpu."
    )
    assert outcome == (
        "Held-out accuracy went from 25.0 % to 75.0 % (+50.0 points) sampled, and from 30.0 % to "
        "80.0 % greedily."
    )
    assert "explained 0.40 of the variance" in critic
    assert "more than the 0.3 of a sound one" in critic
    assert "0.47 in the first fifth of the run and 0.07 in the last" in critic
    assert "off by 10 points on average at first and by 10 at last" in critic
    assert wires == "1 trip wire tripped: critic worse than constant at tick 7."


def test_badges_and_trips(run):
    assert [tuple(badge) for badge in story.badges(run)] == [
        ("finished, 10 ticks", "good"),
        ("held out 25.0 % → 75.0 %", "good"),
        ("1 trip wire tripped", "bad"),
    ]
    [trip] = story.trips(run)
    assert (trip.where, trip.wire, trip.done) == (
        "tick 7",
        "critic worse than constant",
        "only told",
    )
    assert trip.knob == "--config.critic.lr=1e-4"


def test_a_run_that_goes_on(run):
    going = dataclasses.replace(run, results=None, metrics=run.metrics[:-4], tripwires=[])
    told = story.sentences(going)
    assert "6 of 10 ticks" in told[0]
    assert told[2] == (
        "Held-out accuracy went from 20.0 % to 45.0 % (+25.0 points) by the last evaluation. "
        "results.json isn't there: the run still goes on, or stopped after 6 ticks."
    )
    assert told[-1] == "No trip wire tripped."
    assert story.badges(going)[0] == ("not finished: 6 of 10 ticks", "bad")
    assert story.level_table(going) is None


def test_a_run_without_critic_or_anything(run):
    config = {"recipe": {"critic": None, "advantage": {"kind": "GroupRelative"}}}
    bare = dataclasses.replace(
        run, config=config, results=None, pretraining={}, metrics=[], tripwires=[]
    )
    assert story.sentences(bare) == [
        "A policy was trained with GroupRelative and no critic.",
        "Held-out accuracy was not measured.",
        "The method has no critic.",
        "This run had no trip wires.",
    ]


def test_levels_stand_in_order(run):
    assert story.level_table(run).rows == [
        ("steps 2", "25.0 %", "75.0 %", "+50.0"),
        ("steps 10", "12.5 %", "37.5 %", "+25.0"),
    ]


def test_numbers_as_people_say_them():
    seconds = [0.25, 61, 200, 7200, 1e5, math.nan]
    assert [story.duration(s) for s in seconds] == [
        "0.2 s", "61 s", "3 min", "2 h 00 min", "27 h 47 min", "not measured"
    ]  # fmt: skip
    assert story.percent(0.1234) == "12.3 %"
    assert story.plain(-0.5) == "−0.50"
    sizes = [99_968, 135_000_000, 1_540_000_000]
    assert [story._size(n) for n in sizes] == ["99,968", "135 million", "1.54 billion"]


def test_runs_beside_each_other(run):
    other = dataclasses.replace(run, name="other", results=None, tripwires=[])
    table = story.comparison([run, other])
    rows = {row[0]: row[1:] for row in table.rows}
    assert table.headings == ("", "small", "other")
    assert rows["finished"] == ("yes", "no")
    assert rows["held out, last"] == ("75.0 %", "45.0 %")
    many = dataclasses.replace(other, config=run.config | {"mesh": dict.fromkeys("ab", 1)})
    assert story.difference_table([run, many]).rows == [("mesh", "-", "there")]
    fields = [str(n) for n in range(25)]
    both = [dataclasses.replace(run, config={"x": dict.fromkeys(fields, n)}) for n in (1, 2)]
    shown = story.difference_table(both).rows
    assert (shown[0], len(shown), shown[-1]) == (("x.0", "1", "2"), 21, ("and 5 more", "", ""))
    assert rows["trip wires"] == ("critic worse than constant", "none")


@pytest.mark.parametrize("name", RECIPES)
def test_a_kept_recipe_is_called_by_its_name(name):
    kept = json.loads(json.dumps(recipe_dict(RECIPES[name])))
    assert story.nearest_recipe(kept) == (name, [])
    kept["select"] = {"kind": "Another"}
    assert story.nearest_recipe(kept) == (name, ["select"])
