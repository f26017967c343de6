"""The watcher of a run: what it measures, keeps and says, on a tick made by hand."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from s3ac_jax.config.watch import WatchConfig
from s3ac_jax.core.errors import RunError
from s3ac_jax.data import arithmetic
from s3ac_jax.report.lines import read_lines
from s3ac_jax.report.tripwires import Coverage, Trip, Tripwires
from s3ac_jax.train.gather import Gathered
from s3ac_jax.train.prepare import Prepared
from s3ac_jax.train.watch import PretrainingWatcher, Tripped, Watcher, told
from tests.unit.train.small import PROMPTS, RESPONSES, nine
from tests.unit.train.small_tick import HALVES, prompt_set, tick_of

PRESENT = sorted(HALVES[0] + HALVES[1])
V0 = np.where(np.isin(np.arange(10), PRESENT), np.linspace(-0.9, 0.9, 10), np.nan)
ADVANTAGE = np.where(np.isin(np.arange(10), PRESENT), np.linspace(0.5, -0.4, 10), np.nan)
SICK, WELL = {"ungraded": 0.9}, {"ungraded": 0.0}
TRIP = Trip("reward_flat", "it is flat", "converged", "--config.actor.lr", 0.5, 0.25)


def parts_of(**watch):
    config = SimpleNamespace(
        watch=WatchConfig(**watch), rollout=SimpleNamespace(max_response_tokens=12)
    )
    return SimpleNamespace(
        config=config, train=SimpleNamespace(prompts=prompt_set()),
        task=SimpleNamespace(tokenizer=arithmetic.TOKENIZER),
    )  # fmt: skip


def watcher_of(folder, start=0, history=(), coverage=None, **watch):
    return Watcher(parts_of(**watch), folder, "online", start, list(history), coverage)


def trained():
    """Response 4 got no verdict."""
    return dataclasses.replace(nine(), valid=np.arange(9) != 4)


def see(watcher, tick, *, values=True, scored=None):
    packed, scores, actor = tick_of(values)
    v0 = V0.astype(np.float32) if values else None
    band = np.zeros(2, np.float32)
    made = Prepared(actor, None, band, {}, v0, ADVANTAGE.astype(np.float32))
    scored = trained() if scored is None else scored
    batch = Gathered(scored, trained(), np.zeros(9), [], None, None, 0)
    watcher.see(tick, batch, packed, scores, made)


def lines(folder, name):
    return read_lines(folder / f"{name}.jsonl")


def test_a_tick_is_told_late_and_once_and_in_its_turn(tmp_path):
    with watcher_of(tmp_path, trajectories=2) as watcher:
        assert watcher.told() == {}
        see(watcher, 5)
        assert not list(tmp_path.iterdir())  # nothing is read yet
        see(watcher, 6)
        first = watcher.told()
        assert [line["tick"] for line in lines(tmp_path, "responses")] == [5]
        second = watcher.told()
        assert watcher.told() == {}
    assert [line["tick"] for line in lines(tmp_path, "responses")] == [5, 6]
    assert [line["tick"] for line in lines(tmp_path, "trajectories")] == [5, 5, 6, 6]
    assert lines(tmp_path, "tripwires") == []
    # But for the memory, the same.
    assert first | {"memory/host_peak_gib": 0} == second | {"memory/host_peak_gib": 0}


def test_responses_are_kept_in_columns(tmp_path):
    with watcher_of(tmp_path) as watcher:
        see(watcher, 0)
        watcher.told()
    (line,) = lines(tmp_path, "responses")
    scored = nine()
    assert line.pop("tick") == 0
    assert line["prompt"] == PRESENT  # 4 got no verdict; prompt n is asked by response n
    assert line["level"] == [f"steps_{PROMPTS[n]}" for n in PRESENT]
    assert line["tokens"] == [RESPONSES[n] for n in PRESENT]
    assert line["stopped"] == [bool(scored.rollout.stopped[n]) for n in PRESENT]
    assert line["success"] == [bool(scored.success[n]) for n in PRESENT]
    assert line["reward"] == [float(scored.reward[n]) for n in PRESENT]
    assert line["v0"] == pytest.approx([V0[n] for n in PRESENT], rel=6e-5)
    assert line["advantage"] == pytest.approx([ADVANTAGE[n] for n in PRESENT], rel=6e-5)
    assert {len(column) for column in line.values()} == {8}


@pytest.mark.parametrize(("most", "kept"), [(3, [0, 2, 6]), (1, [0]), (8, PRESENT), (99, PRESENT)])
def test_at_most_so_many_responses_spread_over_all(tmp_path, most, kept):
    with watcher_of(tmp_path, responses=most) as watcher:
        see(watcher, 0)
        watcher.told()
    (line,) = lines(tmp_path, "responses")
    assert line["prompt"] == kept
    assert line["tokens"] == [RESPONSES[n] for n in kept]


def test_nothing_is_kept_where_nothing_is_wanted(tmp_path):
    with watcher_of(tmp_path, responses=0) as watcher:
        see(watcher, 0)
        assert watcher.told()
    assert not list(tmp_path.iterdir())


def test_trajectories_are_the_ones_chosen(tmp_path):
    with watcher_of(tmp_path, trajectories=20) as watcher:
        see(watcher, 0)
        watcher.told()
    found = lines(tmp_path, "trajectories")
    assert sorted(line["response"] for line in found) == PRESENT
    for line in found:
        n = line["response"]
        assert line["tokens"] == nine().rollout.tokens[n, : RESPONSES[n]].tolist()
        assert len(line["value"]) == len(line["advantage"]) == RESPONSES[n]
    right = [line["success"] for line in found]
    assert right == sorted(right)


def test_metrics_speak_of_all_that_was_made_and_of_what_was_trained(tmp_path):
    # Trained on two of them; nine were made, eight of which were graded.
    two = jax.tree.map(lambda x: x[:2], nine())
    with watcher_of(tmp_path) as watcher:
        see(watcher, 0, scored=two)
        found = watcher.told()
    shares = {name: x for name, x in found.items() if name.startswith("coverage/share")}
    # Of 12 tokens, in eighths: 0 1 3 4 6 7 9 10 12.
    want = {}
    for low, high in zip((0, 1, 3, 4, 6, 7, 9, 10), (1, 3, 4, 6, 7, 9, 10, 12), strict=True):
        count = sum(low < RESPONSES[n] <= high for n in PRESENT)
        want[f"coverage/share_{low}_{high}"] = count / 8
    assert shares == pytest.approx(want)
    reward = nine().reward[:2]
    assert found["v0_mean_error"] == pytest.approx(np.mean(V0[:2] - reward), rel=1e-5)
    assert found["advantage/steps_3"] == pytest.approx(ADVANTAGE[0])
    assert found["advantage/steps_1"] == pytest.approx(ADVANTAGE[1])
    assert "advantage/steps_5" not in found
    assert found["memory/host_peak_gib"] > 0.05


def test_a_method_without_values_has_none_to_tell(tmp_path):
    with watcher_of(tmp_path, trajectories=1) as watcher:
        see(watcher, 0, values=False)
        found = watcher.told()
    assert not [name for name in found if name.startswith("v0")]
    assert lines(tmp_path, "responses")[0]["v0"] is None
    assert lines(tmp_path, "trajectories")[0]["value"] is None


def test_a_tick_without_one_response(tmp_path):
    nobody = jax.tree.map(lambda x: x[:0], nine())
    ungraded = dataclasses.replace(nine(), valid=np.zeros(9, bool))
    for scored in (nobody, ungraded):
        with watcher_of(tmp_path, trajectories=2) as watcher:
            see(watcher, 0, scored=scored)
            assert "memory/host_peak_gib" in watcher.told()
    for line in lines(tmp_path, "responses"):
        assert line["prompt"] == line["level"] == line["v0"] == []
    assert lines(tmp_path, "trajectories") == []


def test_what_comes_again_is_dropped_from_the_files(tmp_path):
    def write(name, *found):
        text = "".join(json.dumps(line) + "\n" for line in found)
        (tmp_path / f"{name}.jsonl").write_text(text + '{"tick": 1, "torn')

    for name in ("responses", "trajectories"):
        write(name, *({"tick": tick} for tick in (0, 1, 2, 2, 3, 4)))
    trips = [("value_pretraining", 9), ("online", 2), ("online", 3), ("online", 4)]
    write(
        "tripwires",
        *({"stage": stage, "tick": tick, "before": tick + 1, "action": "tell"}
          for stage, tick in trips),
    )  # fmt: skip
    watcher_of(tmp_path, start=3).__exit__()
    for name in ("responses", "trajectories"):
        assert [line["tick"] for line in lines(tmp_path, name)] == [0, 1, 2, 2]
    found = [(line["stage"], line["tick"]) for line in lines(tmp_path, "tripwires")]
    assert found == [("value_pretraining", 9), ("online", 2)]


def judged(watcher, *ticks, start=0):
    """Names of the wires that speak at each of the ticks."""
    return [
        [trip.wire for trip in watcher.judge({"tick": start + n, "reward": 0.0} | metrics)]
        for n, metrics in enumerate(ticks)
    ]


WINDOW = Tripwires(window=2)


def test_a_wire_speaks_once_until_all_is_well_again(tmp_path):
    with watcher_of(tmp_path, tripwires=WINDOW) as watcher:
        found = judged(watcher, WELL, SICK, SICK, WELL, WELL, WELL, SICK)
    # Over two ticks 0.45, 0.9, 0.45, 0, 0, 0.45.
    once = ["verifier_failing"]
    assert found == [[], once, [], [], [], [], once]


def test_a_resumed_run_does_not_say_again_what_was_said(tmp_path):
    before = [{"stage": "online", "tick": n, "reward": 0.0} | SICK for n in range(4)]
    with watcher_of(tmp_path, start=3, history=before, tripwires=WINDOW) as watcher:
        assert judged(watcher, SICK, start=3) == [[]]
    # What comes again is no history.
    later = [line | ({} if line["tick"] < 3 else SICK) | WELL for line in before[:3]]
    with watcher_of(tmp_path, start=3, history=[*later, before[3]], tripwires=WINDOW) as watcher:
        assert judged(watcher, SICK, start=3) == [["verifier_failing"]]


def test_coverage_is_compared_with_what_the_critic_saw(tmp_path):
    long_and_right = {"coverage/share_1_3": 1.0, "coverage/accuracy_1_3": 0.5}
    for correct, found in (((9, 0), [["coverage_missing"]]), ((5, 4), [[]])):
        seen = Coverage((0, 1, 3), (50, 50), correct)
        with watcher_of(tmp_path, coverage=seen) as watcher:
            assert judged(watcher, long_and_right) == found


def test_going_back_is_counted_and_forgets_what_led_there(tmp_path):
    with watcher_of(tmp_path, tripwires=WINDOW) as watcher:
        assert watcher.rollbacks == 0
        assert judged(watcher, WELL, SICK) == [[], ["verifier_failing"]]
        watcher.record(1, TRIP, "rollback", 2)
        watcher.record(1, TRIP._replace(wire="other"), "rollback", 2)  # of one and the same
        watcher.begin_anew()
        assert watcher.rollbacks == 1
        # Said anew: it is another policy. With the ticks of before, the first would trip too.
        assert judged(watcher, WELL, SICK, start=2) == [[], ["verifier_failing"]]
        watcher.record(3, TRIP, "tell", 4)
        watcher.record(4, TRIP, "rollback", 5)
        watcher.begin_anew()
        assert watcher.rollbacks == 2
    found = lines(tmp_path, "tripwires")
    assert found[0] == {
        "stage": "online", "tick": 1, "wire": "reward_flat", "verdict": "it is flat",
        "cause": "converged", "knob": "--config.actor.lr", "value": 0.5, "threshold": 0.25,
        "action": "rollback", "before": 2,
    }  # fmt: skip
    # Another process knows as much, and forgets the ticks of before as well.
    sick = [{"stage": "online", "tick": n, "reward": 0.0} | SICK for n in range(6)]
    with watcher_of(tmp_path, start=6, history=sick[:5], tripwires=WINDOW) as watcher:
        assert watcher.rollbacks == 2
        assert judged(watcher, WELL, start=6) == [[]]
        assert judged(watcher, SICK, start=7) == [["verifier_failing"]]
    with watcher_of(tmp_path, start=4, history=sick[:4], tripwires=WINDOW) as watcher:
        assert watcher.rollbacks == 1


def test_without_a_look_nothing_is_seen_said_or_kept(tmp_path):
    with watcher_of(tmp_path, health=False, trajectories=2, tripwires=WINDOW) as watcher:
        see(watcher, 0)
        assert watcher.told() == {}
        assert judged(watcher, SICK, SICK) == [[], []]
    assert not list(tmp_path.iterdir())


CLIPPED = {"critic_clipped_steps": 1.0, "critic_head_share": 0.95, "value_loss": 3.0}


class Notes(list):
    """Keeps what is said."""

    note = list.append


def pretraining(folder, notes, rates=None, **watch):
    rates = {"late": 0.4} if rates is None else rates
    return PretrainingWatcher(parts_of(**watch), folder, rates, notes)


def test_pretraining_tells_once_and_goes_on(tmp_path):
    (tmp_path / "tripwires.jsonl").write_text(
        '{"stage": "value_pretraining", "tick": 3}\n{"stage": "online", "tick": 4}\n'
    )
    notes = Notes()
    with pretraining(tmp_path, notes, tripwires=WINDOW) as watcher:
        for step in range(1, 6):
            watcher.judge(step, CLIPPED, "go on")
    (note,) = notes
    assert note.startswith("TRIP WIRE head_dominates at value-pretraining step 2: ")
    # Pretraining begins anew, so what it said before is gone.
    found = lines(tmp_path, "tripwires")
    assert [(line["stage"], line["tick"]) for line in found] == [
        ("online", 4), ("value_pretraining", 2)
    ]  # fmt: skip
    assert found[1]["action"] == "tell"
    assert found[1]["value"] == 1.0


@pytest.mark.parametrize("action", ["stop", "rollback"])
def test_pretraining_stops_where_that_is_wanted(tmp_path, action):
    notes, wires = Notes(), dataclasses.replace(WINDOW, action=action)
    command = "python launch/train.py --workdir=here"
    with pretraining(tmp_path, notes, tripwires=wires) as watcher:
        watcher.judge(1, CLIPPED, command)
        with pytest.raises(Tripped, match="head_dominates") as caught:
            watcher.judge(2, CLIPPED, command)
    assert isinstance(caught.value, RunError)
    assert caught.value.exit_code == 3
    message = str(caught.value)
    assert "\n" not in message
    assert command in message
    assert "--config.watch.tripwires.action=tell" in message
    assert len(notes) == 1
    assert [line["action"] for line in lines(tmp_path, "tripwires")] == ["stop"]


def test_pretraining_on_nobody_who_is_right(tmp_path):
    notes, nobody = Notes(), {"early": 0.0, "late": 0.0}
    with pretraining(tmp_path, notes, nobody) as watcher:
        watcher.judge(1, {}, "")
        watcher.judge(2, {}, "")
    assert [line["wire"] for line in lines(tmp_path, "tripwires")] == ["verifier_failing"]
    with pretraining(tmp_path, notes, nobody, health=False) as watcher:
        watcher.judge(1, CLIPPED, "")
    assert len(notes) == 1
    assert lines(tmp_path, "tripwires") == []


def test_a_trip_in_one_line():
    assert told(7, TRIP) == (
        "TRIP WIRE reward_flat at tick 7: it is flat. Likely cause: converged. Look at: "
        "--config.actor.lr"
    )
