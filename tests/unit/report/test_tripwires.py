"""Every rule on made-up histories, and all of them on a run that was well."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from s3ac_jax.report.tripwires import (
    Coverage,
    Tripwires,
    coverage_name,
    tripped,
    tripped_in_pretraining,
)

WELL = {
    "reward": 0.2, "success": lambda t: 0.3 + 0.004 * t, "entropy": 0.5, "response_tokens": 20.0,
    "truncated": 0.02, "ungraded": 0.0, "staleness": 0.0, "mismatch_abs_log": 1e-6,
    "mismatch_kept": 1.0, "critic_clipped_steps": 0.1, "critic_head_share": 0.6,
    "value_loss": 0.4, "value_r2": 0.3, "value_mean_error": 0.02,
}  # fmt: skip


def history(ticks, **changes):
    """A line per tick; each value is a number, or a function of the tick."""
    series = WELL | changes
    return [{name: x(t) if callable(x) else x for name, x in series.items()} for t in range(ticks)]


def late(before, after, since=10):
    return lambda t: before if t < since else after


# wire -> (the threshold that is its switch, ticks, what trips it, what falls just short of that)
CASES = {
    "head_dominates": (
        "clipped_steps", 10, {"critic_clipped_steps": 0.81}, {"critic_clipped_steps": 0.79},
    ),
    "critic_worse_than_constant": ("value_r2", 10, {"value_r2": -0.21}, {"value_r2": -0.19}),
    "entropy_runs_away, up": (
        "entropy_rise", 20, {"entropy": late(0.5, 1.01)}, {"entropy": late(0.5, 0.99)},
    ),
    "entropy_runs_away, down": (
        "entropy_fall", 20, {"entropy": late(0.5, 0.049), "success": 0.3},
        {"entropy": late(0.5, 0.051), "success": 0.3},
    ),
    "length_runs_away, cut off": ("truncated", 10, {"truncated": 0.51}, {"truncated": 0.49}),
    "length_runs_away, longer": (
        "length_change", 20, {"response_tokens": late(20, 41), "success": 0.3},
        {"response_tokens": late(20, 39), "success": 0.3},
    ),
    "length_runs_away, shorter": (
        "length_change", 20, {"response_tokens": late(20, 9), "success": 0.3},
        {"response_tokens": late(20, 11), "success": 0.3},
    ),
    "length_runs_away, empty": (
        "length_change", 20, {"response_tokens": late(20, 0), "success": 0.3},
        {"response_tokens": late(20, 11), "success": 0.3},
    ),
    "sampler_disagrees": (
        "mismatch", 3, {"mismatch_abs_log": 0.051}, {"mismatch_abs_log": 0.049},
    ),
    "reward_flat": (
        "flat_ticks", 50, {"success": late(0.3, 0.309, 25)}, {"success": late(0.3, 0.311, 25)},
    ),
    "verifier_failing, rejects": (
        "all_wrong_ticks", 5, {"success": 0.0}, {"success": late(0.0, 0.004, 4)},
    ),
    "verifier_failing, accepts": (
        "all_wrong_ticks", 5, {"success": 1.0}, {"success": late(1.0, 0.996, 4)},
    ),
    "verifier_failing, silent": ("ungraded", 3, {"ungraded": 0.11}, {"ungraded": 0.09}),
}  # fmt: skip
WIRES = Tripwires()


def names(found):
    return [trip.wire for trip in found]


def of_case(case):
    return case.partition(",")[0]


@pytest.mark.parametrize("case", CASES)
def test_a_wire_trips_beyond_its_threshold_and_not_before(case):
    switch, ticks, sick, well = CASES[case]
    found = tripped(history(ticks, **sick), WIRES)
    assert names(found) == [of_case(case)]
    assert tripped(history(ticks, **well), WIRES) == []
    assert tripped(history(ticks, **sick), dataclasses.replace(WIRES, **{switch: None})) == []
    # What was measured is beyond the threshold that is told with it, or is the one.
    trip = found[0]
    assert math.isfinite(trip.value)
    below = of_case(case) in ("critic_worse_than_constant", "reward_flat")
    assert trip.value <= trip.threshold if below else trip.value >= trip.threshold


@pytest.mark.parametrize("case", CASES)
def test_a_trip_is_a_sentence_a_cause_and_a_knob(case):
    _, ticks, sick, _ = CASES[case]
    (trip,) = tripped(history(ticks, **sick), WIRES)
    for text in (trip.verdict, trip.cause, trip.knob):
        assert len(text) > 20
        assert "\n" not in text
        assert "nan" not in text
    assert "--config." in trip.knob or "grade one" in trip.knob


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("head_dominates", "cuts 81 % of the critic's steps"),
        ("critic_worse_than_constant", "R² -0.21, median of 10 ticks; V is +0.02 off"),
        ("entropy_runs_away, up", "1.01 nats per token, 2.0 times"),
        ("entropy_runs_away, down", "0.049 nats per token, 0.098 of what it was"),
        ("length_runs_away, cut off", "51 % of the responses meet the length limit"),
        ("length_runs_away, longer", "have 41 tokens, 2 times what they had"),
        ("length_runs_away, shorter", "have 9 tokens, 0.45 times what they had"),
        ("sampler_disagrees", "differ by 0.051 nats per token (0.0 % of the tokens are rejected)"),
        ("reward_flat", "success in training did not rise over the last 50 ticks (30.0 % -> 30.9"),
        ("verifier_failing, rejects", "not one response was right in 5 ticks"),
        ("verifier_failing, accepts", "right in all 5 ticks from the first on"),
        ("verifier_failing, silent", "11 % of the responses got no verdict"),
    ],
)
def test_the_verdict_says_what_was_measured(case, said):
    _, ticks, sick, _ = CASES[case]
    assert said in tripped(history(ticks, **sick), WIRES)[0].verdict


def test_of_a_clipped_critic_the_verdict_says_which_part_is_to_blame():
    said = {}
    for share in (0.89, 0.95):
        clipped = {"critic_clipped_steps": 1.0, "critic_head_share": share, "value_loss": 117.0}
        (trip,) = tripped(history(10, **clipped), WIRES)
        said[share] = trip.verdict
    assert "head has 95 % of its squared gradient norm" in said[0.95]
    assert "value loss 117.00, head 89 % of the squared norm" in said[0.89]


def test_too_short_a_history_says_nothing():
    """One tick less than each wire looks at."""
    for case, (_, ticks, sick, _) in CASES.items():
        assert tripped(history(ticks - 1, **sick), WIRES) == [], case
    # The first window and the newest must not overlap.
    for name, value in (("entropy", 50.0), ("entropy", 1e-9), ("response_tokens", 2000.0)):
        changes = {name: late(WELL[name], value), "success": 0.3}
        assert tripped(history(19, **changes), WIRES) == []
        assert len(tripped(history(20, **changes), WIRES)) == 1
    everything = Coverage((0, 20, 40), (100, 100), (0, 0))
    assert tripped([], WIRES, everything) == []
    # A line of the last evaluation is no tick.
    assert tripped([{"held_out/accuracy": 0.0, "ungraded": 1.0}], WIRES, everything) == []


@pytest.mark.parametrize("poison", ["absent", None, math.nan, math.inf])
def test_what_is_not_measured_trips_nothing_and_breaks_nothing(poison):
    def poisoned(lines, keys):
        for line in lines:
            for key in keys:
                line[key] = poison
                if poison == "absent":
                    del line[key]
        return lines

    for case, (_, ticks, sick, _) in CASES.items():
        # All of it, what the wire looks at, and each of the others.
        for keys in (WELL.keys() - {"reward"}, sick):
            lines = poisoned(history(ticks, **sick), keys)
            assert of_case(case) not in names(tripped(lines, WIRES)), (case, keys)
        for key in WELL.keys() - {"reward"}:
            tripped(poisoned(history(ticks, **sick), [key]), WIRES)
            # A tick here and there.
            lines = history(60, **WELL)
            poisoned(lines[5::7], [key])
            assert all(tripped(lines[:n], WIRES) == [] for n in range(61)), key


def test_accuracy_that_nobody_measured_excuses_and_accuses_nobody():
    """The wires for shorter, longer and surer answers ask whether they got better."""
    for changes in ({"response_tokens": late(20, 60)}, {"entropy": late(0.5, 0.01)}):
        for success in (None, math.nan):
            assert tripped(history(20, success=success, **changes), WIRES) == []
        assert len(tripped(history(20, success=0.3, **changes), WIRES)) == 1
        # Better: more right in training, or held out, which counts more.
        assert tripped(history(20, success=late(0.3, 0.32), **changes), WIRES) == []
        held = {
            "success": 0.3,
            "held_out/accuracy": lambda t: 0.1 + t / 100 if t % 5 == 0 else None,
        }
        assert tripped(history(20, **held, **changes), WIRES) == []
        # Up and down again is no gain.
        held |= {"success": late(0.3, 0.5), "held_out/accuracy": lambda t: 0.4 if t == 9 else 0.1}
        assert len(tripped(history(20, **held, **changes), WIRES)) == 1


@pytest.mark.parametrize("where", range(10))
def test_one_tick_of_nearly_equal_outcomes_is_no_bad_critic(where):
    """The variance of outcomes is close to 0 there: R² goes to minus any number."""
    lines = history(10, value_r2=0.4)
    lines[where]["value_r2"] = -1000.0
    assert tripped(lines, WIRES) == []
    # And one good tick does not hide nine bad ones.
    lines = history(10, value_r2=-0.5)
    lines[where]["value_r2"] = 0.9
    (trip,) = tripped(lines, WIRES)
    assert trip.value == -0.5


def test_a_critic_is_judged_by_at_least_half_a_window():
    for there, wanted in ((4, []), (5, ["critic_worse_than_constant"])):
        lines = history(10, value_r2=lambda t, there=there: -2.0 if t < there else None)
        assert names(tripped(lines, WIRES)) == wanted


def test_only_ticks_of_the_same_weights_accuse_the_sampler():
    apart = {"mismatch_abs_log": 0.4, "mismatch_kept": 0.7}
    assert tripped(history(10, **apart, staleness=1.0), WIRES) == []
    (trip,) = tripped(history(10, **apart, staleness=late(0.0, 1.0, 3)), WIRES)
    assert trip.wire == "sampler_disagrees"
    assert trip.value == pytest.approx(0.4)
    assert "30.0 % of the tokens are rejected" in trip.verdict
    assert tripped(history(10, **apart, staleness=late(0.0, 1.0, 2)), WIRES) == []
    # The smallest window looks at three ticks all the same.
    small = Tripwires(window=2)
    assert names(tripped(history(3, **apart), small)) == ["sampler_disagrees"]


def test_flat_asks_the_held_out_problems_first():
    held = {"held_out/accuracy": lambda t: 0.5 + t / 500 if t % 5 == 0 else None}
    assert tripped(history(50, success=0.3, **held), WIRES) == []
    held = {"held_out/accuracy": lambda t: 0.5 if t % 5 == 0 else None}
    (trip,) = tripped(history(50, success=lambda t: t / 100, **held), WIRES)
    assert trip.wire == "reward_flat"
    assert (
        "held-out accuracy did not rise over the last 50 ticks (50.0 % -> 50.0 %)" in trip.verdict
    )
    # Three evaluations are no curve.
    held = {"held_out/accuracy": lambda t: 0.5 if t % 20 == 0 else None}
    assert tripped(history(50, **held), WIRES) == []
    (trip,) = tripped(history(50, success=0.3, **held), WIRES)
    assert "success in training" in trip.verdict
    # Falling is not rising; what is solved need not rise.
    assert names(tripped(history(50, success=late(0.5, 0.4, 25)), WIRES)) == ["reward_flat"]
    assert tripped(history(50, success=0.96), WIRES) == []


def test_a_tick_that_nobody_measured_is_not_all_wrong():
    lines = history(6, success=0.0)
    lines[3]["success"] = None
    assert tripped(lines, WIRES) == []


def test_what_a_wire_saw_long_ago_is_forgotten():
    sick = {"critic_clipped_steps": 1.0, "value_r2": -3.0, "truncated": 0.9, "ungraded": 0.5}
    lines = history(10, **sick) + history(10, truncated=0.02)
    assert set(names(tripped(lines[:10], WIRES))) == {
        "head_dominates", "critic_worse_than_constant", "length_runs_away", "verifier_failing",
    }  # fmt: skip
    assert tripped(lines, WIRES) == []


# Responses by length: of more than 0, 10, 20 and 30 tokens.
EDGES = (0, 10, 20, 30, 40)


def covered(shares, rates):
    found = {}
    for low, high, share, rate in zip(EDGES[:-1], EDGES[1:], shares, rates, strict=True):
        found[f"coverage/share_{low}_{high}"] = share
        if rate is not None:
            found[f"coverage/accuracy_{low}_{high}"] = rate
    return found


def test_long_and_right_answers_that_the_critic_never_saw():
    # Of 1000: 9 are longer than 20 tokens and right.
    seen = Coverage(EDGES, (500, 300, 150, 50), (300, 150, 8, 1))
    lines = history(10, **covered((0.2, 0.3, 0.4, 0.1), (0.5, 0.5, 0.225, 0.3)))
    (trip,) = tripped(lines, WIRES, seen)
    assert trip.wire == "coverage_missing"
    # 0.4 x 0.225 + 0.1 x 0.3; of more than 30 tokens there are too few.
    said = "12 % of the responses have more than 20 tokens and are right; of those that the critic"
    assert said in trip.verdict
    assert "0.9 % were" in trip.verdict
    assert (trip.value, trip.threshold) == (pytest.approx(0.009), 0.01)
    # The mixture had them, no mixture is known, or the wire is off.
    enough = Coverage(EDGES, (500, 300, 150, 50), (300, 150, 9, 1))
    nobody = Coverage(EDGES, (0, 0, 0, 0), (0, 0, 0, 0))
    for coverage in (enough, nobody, None):
        assert tripped(lines, WIRES, coverage) == []
    assert tripped(lines, dataclasses.replace(WIRES, coverage=None), seen) == []


def test_what_is_rare_online_need_not_be_covered():
    seen = Coverage(EDGES, (500, 300, 150, 50), (300, 150, 0, 0))
    for share, wanted in ((0.049, []), (0.051, ["coverage_missing"])):
        lines = history(10, **covered((0.5, 0.5 - share, share, 0.0), (0.5, 0.5, 1.0, None)))
        assert names(tripped(lines, WIRES, seen)) == wanted
    # A bucket that is empty in most ticks, and one that nobody measured.
    lines = history(10, **covered((0.5, 0.4, None, math.nan), (0.5, 0.5, None, None)))
    lines[3] |= covered((0.5, 0.4, 0.1, 0.0), (0.5, 0.5, 1.0, None))
    assert names(tripped(lines, WIRES, seen)) == ["coverage_missing"]
    assert tripped(history(10), WIRES, seen) == []


def test_names_of_buckets_are_those_of_the_metrics():
    assert coverage_name(5, 10) == "5_10"


def test_value_pretraining_has_two_wires():
    step = {"critic_clipped_steps": 1.0, "critic_head_share": 0.95, "value_loss": 3.0}
    rates = {"early": 0.6, "late": 0.0}
    assert tripped_in_pretraining([step] * 9, WIRES, rates) == []
    assert names(tripped_in_pretraining([step] * 10, WIRES, rates)) == ["head_dominates"]
    off = dataclasses.replace(WIRES, clipped_steps=None, all_wrong_ticks=None)
    nobody = {"early": 0.0, "late": 0.0}
    assert tripped_in_pretraining([step] * 10, off, nobody) == []
    (trip,) = tripped_in_pretraining([{"value_loss": None}], WIRES, nobody)
    assert trip.wire == "verifier_failing"
    assert "not one response of the policies (early, late) was right" in trip.verdict
    assert tripped_in_pretraining([], WIRES, {}) == []


def test_a_run_that_was_well_trips_nothing():
    """100 ticks of configs/tiny.py; the file says which command made it."""
    kept = json.loads((Path(__file__).parent / "healthy_metrics.json").read_text())
    metrics, policies = kept["metrics"], kept["coverage"]["policies"].values()
    lines = [dict(zip(metrics, row, strict=True)) for row in zip(*metrics.values(), strict=True)]
    responses, correct = (
        tuple(map(sum, zip(*(one[what] for one in policies), strict=True)))
        for what in ("responses", "correct")
    )
    coverage = Coverage(tuple(kept["coverage"]["edges"]), responses, correct)
    # All that the rules read was measured at some tick.
    assert metrics.keys() > WELL.keys() | {"held_out/accuracy", "coverage/share_35_40"}
    assert len(lines) == 100
    for tick in range(1, 101):
        assert tripped(lines[:tick], WIRES, coverage) == [], tick
    # It is the wires that are quiet, not the data that say nothing.
    strict = Tripwires(
        clipped_steps=0.0, value_r2=0.9, coverage=None, entropy_rise=1.001, truncated=0.0,
        mismatch=1e-9, flat_gain=1.0, ungraded=0.0, length_change=1.001,
    )  # fmt: skip
    found = {trip.wire for tick in range(1, 101) for trip in tripped(lines[:tick], strict)}
    assert found >= {"head_dominates", "critic_worse_than_constant", "sampler_disagrees"}
    assert found >= {"length_runs_away", "reward_flat"}


@pytest.mark.parametrize(
    ("field", "value", "least"),
    [
        ("max_rollbacks", -1, "max_rollbacks must be at least 0, got -1"),
        ("window", 1, "window must be at least 2, got 1"),
        ("flat_ticks", 3, "flat_ticks must be at least 4, got 3"),
        ("all_wrong_ticks", 1, "all_wrong_ticks must be at least 2, got 1"),
        ("entropy_rise", 1.0, "entropy_rise must be above 1, got 1.0"),
        ("entropy_fall", 0.1, "entropy_fall must be above 1, got 0.1"),
        ("length_change", math.nan, "length_change must be above 1, got nan"),
        ("clipped_steps", 80.0, r"clipped_steps must be in 0\.\.1, got 80\.0"),
        ("coverage", -0.1, r"coverage must be in 0\.\.1"),
        ("truncated", 1.1, r"truncated must be in 0\.\.1"),
        ("ungraded", 2.0, r"ungraded must be in 0\.\.1"),
        ("flat_gain", -0.01, r"flat_gain must be in 0\.\.1"),
        ("mismatch", 0.0, r"mismatch must be positive, got 0\.0"),
    ],
)
def test_thresholds_that_mean_nothing_are_refused(field, value, least):
    with pytest.raises(ValueError, match=least):
        Tripwires(**{field: value})


def test_histories_of_all_sorts_break_nothing():
    rng = np.random.default_rng(0)
    odd = [None, math.nan, math.inf, -math.inf, 0.0, 1e30, -1e30, 1, 0.5]
    coverage = Coverage(EDGES, (500, 300, 150, 50), (300, 150, 8, 1))
    keys = [*WELL, "held_out/accuracy", *covered((0,) * 4, (0,) * 4)]
    for _ in range(60):
        lines = [
            {key: odd[rng.integers(len(odd))] for key in keys if rng.random() < 0.8}
            for _ in range(rng.integers(1, 60))
        ]
        for trip in tripped(lines, Tripwires(window=2, flat_ticks=4), coverage):
            assert math.isfinite(trip.value)
