"""A small whole run in this process: what it leaves, what a second call does, full disks."""

import contextlib
import dataclasses
import io
import itertools
import json
import shutil
import types
import weakref

import jax
import numpy as np
import pytest

from s3ac_jax.config.boundary import ConfigError, from_config_dict, to_dict
from s3ac_jax.core.trees import named_leaves
from s3ac_jax.io.checkpoint import Checkpoints
from s3ac_jax.io.weights import load_weights
from s3ac_jax.io.workdir import Workdir
from s3ac_jax.models.spec import DecoderSpec
from s3ac_jax.report import log
from s3ac_jax.report.live import PlainProgress
from s3ac_jax.train import online, policies, sft, value_pretraining
from s3ac_jax.train.build import build
from s3ac_jax.train.interrupt import StopRequest
from s3ac_jax.train.run import STAGES, Run, run
from s3ac_jax.train.tick import evaluate
from tests.integration import runs

TICKS = 6


@pytest.fixture(scope="module")
def rested():
    """Whether the sampler held nothing, for each time that a learner was to be made."""
    return []


@pytest.fixture(scope="module")
def done(tmp_path_factory, rested):
    """Workdir and results of a run of six ticks. Not to be written to."""
    workdir = tmp_path_factory.mktemp("pipeline") / "run"
    with pytest.MonkeyPatch.context() as patch:
        for room, name in ((value_pretraining, "fresh_critic"), (online, "fresh_state")):
            make = getattr(room, name)

            def watched(parts, *args, make=make):
                rested.append(parts.rollout._params is None and parts.rollout._state is None)
                return make(parts, *args)

            patch.setattr(room, name, watched)
        return workdir, run(runs.small_config({"train.num_ticks": TICKS}), workdir)


def test_the_sampler_rests_when_learners_are_made(done, rested):
    # The critic that is pretrained, two diagnoses, and the state of the first tick.
    assert rested == [True] * 4


class Weights:
    """What can be looked for."""


def test_nobody_holds_what_training_began_with(tmp_path, monkeypatch):
    looked_for = []

    def begin(loop, policy, critic):
        looked_for.extend((weakref.ref(policy), weakref.ref(critic)))
        return "state", None

    def go_on(loop, *args):
        assert [one() for one in looked_for] == [None, None]
        return types.SimpleNamespace(actor="trained")

    monkeypatch.setattr(online.OnlineLoop, "begin", begin)
    monkeypatch.setattr(online.OnlineLoop, "go_on", go_on)
    monkeypatch.setattr("s3ac_jax.train.run.params_of", lambda learner: learner)
    monkeypatch.setattr(Run, "policies", lambda run: {"late": Weights()})
    monkeypatch.setattr(Run, "value_pretraining", lambda run, policies: Weights())
    monkeypatch.setattr(Run, "reference", lambda run, base: None)
    parts, folder = build(runs.small_config()), Workdir(tmp_path)
    whole = Run(parts, folder, PlainProgress(STAGES, io.StringIO()), StopRequest())
    with contextlib.closing(whole.log), contextlib.closing(folder):
        assert whole.online(whole.before_online) == "trained"
    assert len(looked_for) == 2


def test_everything_is_in_the_workdir(done):
    workdir, results = done
    assert {path.name for path in workdir.iterdir()} == {
        ".lock", "checkpoints", "config.json", "metrics.jsonl", "pretrained_critic",
        "responses.jsonl", "results.json", "stage_task.json", "stage_value_pretraining.json",
        "summary.png", "tb", "trajectories.jsonl", "versions.json",
    }  # fmt: skip
    config = to_dict(runs.small_config({"train.num_ticks": TICKS}))
    assert json.loads((workdir / "config.json").read_text()) == json.loads(json.dumps(config))
    assert json.loads((workdir / "versions.json").read_text())["jax"] == jax.__version__
    assert json.loads((workdir / "results.json").read_text()) == results
    assert (workdir / "summary.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in (workdir / "tb").iterdir()} == {"online", "value_pretraining"}
    assert Checkpoints(workdir / "checkpoints").steps() == [4, 6]  # keep_checkpoints is 2
    online = [line for line in log.read(workdir / "metrics.jsonl") if line["stage"] == "online"]
    assert [line["tick"] for line in online] == list(range(TICKS + 1))
    evaluated = [line["tick"] for line in online if "held_out/accuracy" in line]
    assert evaluated == [0, 4, 6]  # the last line is the trained policy
    for name in ("base", "trained"):
        for kind in ("sampled", "greedy"):
            assert 0 <= results[name][kind]["held_out/accuracy"] <= 1
    found = results["value_pretraining"]
    assert set(found["success_rates"]) == {"early", "middle", "late"}
    assert found["diagnoses"].keys() == {"ordinary", "s3ac"}


def test_a_second_call_does_nothing_anew(done, tmp_path, monkeypatch):
    workdir, results = done
    shutil.copytree(workdir, tmp_path / "run")
    before = runs.digests(tmp_path / "run")

    def never(*_, **__):
        raise AssertionError("this stage was done")

    monkeypatch.setattr("s3ac_jax.train.online.run_tick", never)
    monkeypatch.setattr(value_pretraining, "coverage_rollouts", never)
    monkeypatch.setattr(value_pretraining, "pretrain_critic", never)
    again = run(runs.small_config({"train.num_ticks": TICKS}), tmp_path / "run")
    assert again == results
    after = runs.digests(tmp_path / "run")
    assert {name for name in before if before[name] != after[name]} == set()
    # TensorBoard is told from which tick on points may come again.
    assert all(name.startswith("tb/online/") for name in after.keys() - before.keys())


def test_a_run_without_a_critic_and_with_a_reference(tmp_path, monkeypatch):
    config = runs.small_config({"train.num_ticks": 2, "reference.samples": 4}, "spo")
    results = run(config, tmp_path)
    assert results.keys() == {"base", "trained"}
    assert {path.name for path in tmp_path.iterdir()} == {
        ".lock", "checkpoints", "config.json", "metrics.jsonl", "reference.npy", "responses.jsonl",
        "results.json", "trajectories.jsonl",
        "stage_reference.json", "stage_task.json", "summary.png", "tb", "versions.json",
    }  # fmt: skip
    rate = np.load(tmp_path / "reference.npy")
    assert rate.shape == (64,)
    assert set((4 * rate).tolist()) <= {0, 1, 2, 3, 4}
    facts = json.loads((tmp_path / "stage_reference.json").read_text())
    assert facts["success_rate"] == pytest.approx(rate.mean(), rel=1e-6)
    lines = [line for line in log.read(tmp_path / "metrics.jsonl") if "policy_loss" in line]
    assert len(lines) == 2
    for line in lines:
        assert 0 <= line["reference_mid"] <= 1
        assert not {"value_loss", "explained_variance"} & line.keys()
    # The history began with what the reference found.
    parts = dataclasses.replace(build(config), reference=rate)
    state, _ = Checkpoints(tmp_path / "checkpoints").restore(2, online.abstract_state(parts))
    assert state.critic is None
    unmet = np.asarray(state.stats.last.num_tokens) == 0
    assert 48 <= unmet.sum() < 64
    a_0 = 8 * (4 * rate + 0.5) / 5
    np.testing.assert_allclose(np.asarray(state.stats.successes)[unmet], a_0[unmet], rtol=1e-5)
    monkeypatch.setattr("s3ac_jax.train.run.reference_success", None)  # it is not made again
    assert run(config, tmp_path) == results


@pytest.mark.parametrize(
    ("preset", "wanted"),
    [
        ("s3ac_single", {"early": 16, "middle": 16, "late": 32}),
        ("vc_ppo", {"late": 64}),
        ("vapo", {"late": 64}),
        ("ppo", {}),
        ("sao", {}),
        ("pcl", {}),
        ("grpo", {}),
    ],
)
def test_what_the_critic_is_pretrained_on(preset, wanted):
    config = runs.small_config({"train.batch_prompts": 16, "train.num_ticks": 11}, preset)
    assert value_pretraining.wanted_prompts(config) == wanted
    without = runs.small_config({"value_pretraining.early_prompts": 0}, "s3ac_single")
    assert value_pretraining.wanted_prompts(without) == {"middle": 16, "late": 32}


def test_no_diagnosis_without_steps_for_it():
    parts = build(runs.small_config({"value_pretraining.diagnose_steps": 0}))
    assert value_pretraining.diagnose(parts, None, None) == {}


def test_policies_are_trained_when_they_are_not_embedded(tmp_path, monkeypatch):
    changes = {
        "sft.embedded": False, "sft.careful_steps": 200, "sft.early_step": 150,
        "sft.hasty_steps": 10, "sft.batch_responses": 4,
    }  # fmt: skip
    parts = build(runs.small_config(changes))

    def stage():
        folder = Workdir(tmp_path)
        progress = PlainProgress(STAGES, io.StringIO())
        with contextlib.closing(folder), parts.on_mesh():
            whole = Run(parts, folder, progress, StopRequest())
            with contextlib.closing(whole.log):
                return whole.policies()

    made = stage()
    assert list(made) == ["early", "middle", "late"]
    facts = json.loads((tmp_path / "stage_policies.json").read_text())
    assert facts["sft"]["hasty_steps"] == 10
    for name in made:
        params, metadata = load_weights(tmp_path / "policies" / f"{name}.safetensors")
        assert json.loads(metadata["made_with"]) == facts
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"float32"}
    leaves = {name: named_leaves(params) for name, params in made.items()}
    for a, b in itertools.combinations(leaves, 2):
        for key, leaf in leaves[a].items():
            if not key.endswith("k_bias"):  # a softmax hardly feels it
                assert np.abs(leaf - leaves[b][key]).max() > 1e-5, (a, b, key)
    lines = [line for line in log.read(tmp_path / "metrics.jsonl") if line["stage"] == "policies"]
    assert [line["tick"] for line in lines] == [50, 100, 150, 200, 210]
    losses = [line["sft_loss"] for line in lines]
    assert losses[3] < losses[0] < np.log(17)

    monkeypatch.setattr(sft, "train_policies", None)  # they are not trained again
    again = jax.tree.map(np.array_equal, stage(), made)
    assert all(jax.tree.leaves(again))


def test_the_embedded_policies_are_those_of_the_config():
    """The files that ship: made as the config asks, and of the three strengths that it needs."""
    config = runs.small_config(
        {"task.num_held_out": 512, "rollout.slots": 128, "rollout.insert_batch": 32}
    )
    parts = build(config)
    folder, network = policies.embedded_folder(), parts.actor.network
    assert sorted(path.name for path in folder.iterdir() if path.suffix == ".safetensors") == [
        "early.safetensors", "late.safetensors", "middle.safetensors"
    ]  # fmt: skip
    wanted = policies.policy_facts(from_config_dict(runs.tiny()))
    accuracy = {}
    for name, params in policies.load_policies(folder, network, policies.POLICIES).items():
        made_with = json.loads(load_weights(folder / f"{name}.safetensors")[1]["made_with"])
        # Fields that came since have the value that they have when left out.
        made_with["model"] = dataclasses.asdict(DecoderSpec(**made_with["model"]))
        assert json.loads(json.dumps(made_with)) == json.loads(json.dumps(wanted))
        with parts.on_mesh():
            params = jax.tree.map(jax.numpy.asarray, params)
            accuracy[name] = evaluate(parts, params, jax.random.key(0))
    late, middle, early = (accuracy[name] for name in ("late", "middle", "early"))
    assert middle["held_out/accuracy"] > 0.95
    assert late["held_out/accuracy_steps_1"] > 0.8
    assert late["held_out/accuracy_steps_8"] < 0.3
    assert late["held_out/accuracy_steps_8"] < late["held_out/accuracy_steps_4"]
    assert 0.2 < late["held_out/accuracy"] < 0.6
    assert early["held_out/accuracy"] < middle["held_out/accuracy"]


# The app under a limit that a checkpoint's arrays exceed and no other file of the run does. The
# kernel then refuses the write (EFBIG) as it does on a full disk (ENOSPC).
LIMITED = f"""
import resource, runpy
resource.setrlimit(resource.RLIMIT_FSIZE, (700_000, 700_000))
runpy.run_path({runs.APP!r}, run_name="__main__")
"""


def test_what_the_devices_do_not_have_claims_nothing(tmp_path):
    changes = {"model.attention": "cudnn", "model.dtype": "bfloat16"}
    with pytest.raises(ConfigError, match="cudnn is for platform cuda, here: cpu"):
        run(runs.small_config(changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_one_line_and_earlier_checkpoints_stay(done, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(done[0], workdir)
    checkpoints = workdir / "checkpoints"
    before = runs.digests(checkpoints)
    code, _, err = runs.launch(workdir, {"train.num_ticks": TICKS + 2}, code=LIMITED)
    assert code == 1
    assert err == (
        f"error: can't save {checkpoints / '8'}: the disk is full; free some space and run the "
        "same command again (step 6 is intact)\n"
    )
    after = runs.digests(checkpoints)
    assert {name: after.get(name) for name in before} == before
    assert Checkpoints(checkpoints).steps() == [4, 6]
    assert run(runs.small_config({"train.num_ticks": TICKS + 2}), workdir)["trained"]
    assert Checkpoints(checkpoints).steps() == [6, 8]
