"""Sick runs raise the right wire and stop, or go back; a healthy one raises none."""

import dataclasses
import gzip
import json
import shutil

import numpy as np
import pytest

from s3ac_jax.config.boundary import from_config_dict
from s3ac_jax.core.trees import named_leaves
from s3ac_jax.io.checkpoint import Checkpoints
from s3ac_jax.report.lines import read_lines
from s3ac_jax.rewards.arithmetic import ArithmeticVerifier
from s3ac_jax.train import online, tick
from s3ac_jax.train.build import build
from s3ac_jax.train.interrupt import Interrupted
from s3ac_jax.train.online import abstract_state
from s3ac_jax.train.run import run
from s3ac_jax.train.watch import Tripped
from tests.integration import runs

SICK = {
    "head_dominates": {"critic.head_std": 1.0, "critic.clip": 1.0},
    # The base policy is the weakest of the three: right in a third of the cases, and never long.
    "coverage_missing": {
        "value_pretraining.early_prompts": 0, "value_pretraining.middle_prompts": 0,
        "value_pretraining.late_prompts": 10240, "value_pretraining.epochs": 1,
        "value_pretraining.diagnose_steps": 0,
    },
    "verifier_failing": {},
}  # fmt: skip


def tripped(workdir):
    return [
        (line["wire"], line["stage"], line["tick"], line["action"])
        for line in read_lines(workdir / "tripwires.jsonl", ("stage", "tick", "wire"))
    ]


def always_wrong(monkeypatch):
    grade = ArithmeticVerifier.grade

    def wrong(verifier, rollout):
        scored = grade(verifier, rollout)
        no = np.zeros_like(scored.success)
        return dataclasses.replace(scored, reward=no - np.float32(1), success=no)

    monkeypatch.setattr(ArithmeticVerifier, "grade", wrong)


@pytest.mark.parametrize("wire", SICK)
def test_a_sick_run_of_full_size_is_stopped_by_its_wire(wire, tmp_path, monkeypatch):
    """configs/tiny.py with one fault, 20 ticks. No other wire speaks."""
    config = runs.tiny()
    stopping = {"train.num_ticks": 20, "watch.tripwires.action": "stop"}
    config.update_from_flattened_dict(stopping | SICK[wire])
    if wire == "verifier_failing":
        always_wrong(monkeypatch)
    with pytest.raises(Tripped, match=f"stopped by a trip wire, {wire}") as error:
        run(from_config_dict(config), tmp_path)
    assert error.value.exit_code == 3
    assert "\n" not in str(error.value)
    ((found, _, _, action),) = tripped(tmp_path)
    assert (found, action) == (wire, "stop")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_healthy_run_raises_none_in_a_hundred_ticks(seed, tmp_path):
    config = runs.tiny()
    config.seed = seed
    run(from_config_dict(config), tmp_path)
    assert tripped(tmp_path) == []
    assert len(read_lines(tmp_path / "responses.jsonl")) == 100


# A bar that no critic clears, so that a wire trips as soon as it has seen two ticks.
ROLLBACK = {
    "watch.tripwires.action": "rollback", "watch.tripwires.value_r2": 0.999,
    "watch.tripwires.window": 2, "watch.tripwires.max_rollbacks": 2,
    "watch.tripwires.coverage": None, "train.batch_prompts": 16, "scheduler.candidates": 32,
}  # fmt: skip


# By how often a run is saved: what trips when and what is done, where it goes back, how many ticks
# it makes. Metrics are read one tick late, but before a state is saved.
ENDS = {
    2: ([(1, "rollback"), (3, "rollback"), (5, "stop")], [2, 4], 6),
    5: ([(1, "rollback"), (4, "rollback"), (6, "tell")], [3, 5], 8),
}


def changes(every):
    return ROLLBACK | {"cadence.save_every": every, "cadence.keep_checkpoints": 9}


def run_to_its_end(every, workdir):
    config = runs.small_config(changes(every))
    if ENDS[every][0][-1][1] == "tell":
        run(config, workdir)
    else:
        with pytest.raises(Tripped, match="went back too often"):
            run(config, workdir)


@pytest.fixture(scope="module", params=ENDS)
def went_back(request, tmp_path_factory):
    """A run that goes back twice: how often it is saved, and its workdir."""
    workdir = tmp_path_factory.mktemp("back") / "run"
    run_to_its_end(request.param, workdir)
    return request.param, workdir


def saved(every, workdir, step):
    """Every array of a checkpoint by name."""
    parts = build(runs.small_config(changes(every)))
    state, _ = Checkpoints(workdir / "checkpoints").restore(step, abstract_state(parts))
    return {name: np.asarray(leaf) for name, leaf in named_leaves(state).items()}


def test_a_rollback_takes_old_weights_and_new_prompts(went_back):
    every, workdir = went_back
    told, back, end = ENDS[every]
    assert tripped(workdir) == [
        ("critic_worse_than_constant", "online", tick, action) for tick, action in told
    ]
    first = saved(every, workdir, 0)
    for step in back:
        state = saved(every, workdir, step)
        assert state["tick"] == step
        moved = state["cursor/offset"], state["cursor/epoch"]
        assert moved != (first["cursor/offset"], first["cursor/epoch"])
        for name, leaf in state.items():
            if name.startswith(("actor", "critic", "stats")):
                np.testing.assert_array_equal(leaf, first[name], err_msg=name)
    # After the last time it went on to learn.
    assert any(
        (saved(every, workdir, end)[name] != leaf).any()
        for name, leaf in state.items() if name.startswith("actor/trainable")
    )  # fmt: skip


def test_a_run_that_went_back_resumes_as_if_never_stopped(went_back, tmp_path, monkeypatch):
    every, workdir = went_back
    _, back, end = ENDS[every]
    seen = []

    def stopping(parts, state, *rest):
        seen.append(int(state.tick))
        if seen == list(range(back[0] + 1)):
            # Between the first rollback and the second.
            raise Interrupted("stopped by the test")
        return tick.run_tick(parts, state, *rest)

    monkeypatch.setattr(online, "run_tick", stopping)
    with pytest.raises(Interrupted):
        run(runs.small_config(changes(every)), tmp_path / "run")
    run_to_its_end(every, tmp_path / "run")
    assert seen == [*range(back[0] + 1), *range(back[0], end)]
    for name in ("responses", "trajectories", "tripwires"):
        here, there = (folder / f"{name}.jsonl" for folder in (tmp_path / "run", workdir))
        assert here.read_text() == there.read_text()
    assert runs.metric_lines(tmp_path / "run", "online") == runs.metric_lines(workdir, "online")
    wanted = saved(every, workdir, end)
    for name, leaf in saved(every, tmp_path / "run", end).items():
        np.testing.assert_array_equal(leaf, wanted[name], err_msg=name)


def test_what_was_stopped_goes_on_when_told_to(went_back, tmp_path):
    every, workdir = went_back
    shutil.copytree(workdir, tmp_path / "run")
    results = run(
        runs.small_config(changes(every) | {"watch.tripwires.action": "tell"}), tmp_path / "run"
    )
    assert 0 <= results["trained"]["sampled"]["held_out/accuracy"] <= 1
    lines = read_lines(tmp_path / "run" / "responses.jsonl")
    assert [line["tick"] for line in lines] == list(range(runs.SMALL["train.num_ticks"]))


def test_kept_trajectories_are_what_was_trained_on(went_back):
    """The file against the responses themselves: sums, lengths, the verdict."""
    every, workdir = went_back
    lines = read_lines(workdir / "trajectories.jsonl")
    assert [line["tick"] for line in lines] == [n for n in range(ENDS[every][2]) for _ in range(2)]
    columns = {line["tick"]: line for line in read_lines(workdir / "responses.jsonl")}
    for line in lines:
        length = len(line["tokens"])
        assert {len(line[name]) for name in (
            "pieces", "value", "advantage", "logp_old", "logp_rollout", "ratio", "weight",
        )} == {length}  # fmt: skip
        text = "".join(line["pieces"])
        assert text.endswith("<stop>") == line["stopped"]
        # The answer that stands there is the verdict that stands there.
        right = solved("".join(line["prompt_pieces"]))
        said = text.removesuffix("<stop>").rpartition("#")[2]
        assert (said == right) == line["success"] == (line["reward"] == 1)
        of_tick = columns[line["tick"]]
        # All of a tick's responses are kept there, in their order.
        n = line["response"]
        assert of_tick["tokens"][n] == length
        assert of_tick["v0"][n] == pytest.approx(line["value"][0], rel=1e-4)
        assert of_tick["advantage"][n] == pytest.approx(np.mean(line["advantage"]), rel=1e-3)
        # V and A of the last token: with V beyond it 0, A = R - V.
        assert line["advantage"][-1] == pytest.approx(line["reward"] - line["value"][-1], abs=1e-4)


def solved(prompt):
    """The answer to a chain of operations, worked from left to right, last digit only."""
    result = int(prompt[0])
    for sign, digit in zip(prompt[1:-1:2], prompt[2:-1:2], strict=True):
        n = int(digit)
        result = {"+": result + n, "-": result - n, "*": result * n}[sign] % 10
    return str(result)


def test_one_tick_is_traced_when_asked_for(tmp_path, capsys):
    few = {"train.num_ticks": 4, "value_pretraining.diagnose_steps": 0}
    run(runs.small_config(few), tmp_path, profile=True)
    (trace,) = tmp_path.rglob("perfetto_trace.json.gz")
    assert f"trace of one tick: {trace}" in capsys.readouterr().out
    events = json.loads(gzip.decompress(trace.read_bytes()))
    names = [event.get("name") for event in events["traceEvents"]]
    assert names.count("tick") == 1
    assert {"select", "rollout", "score", "critic", "prepare", "actor"} <= set(names)
    (device,) = tmp_path.rglob("*.xplane.pb")
    for scope in (b"critic_loss", b"actor_loss", b"token_logp", b"optimizer", b"advantages"):
        assert scope in device.read_bytes()
