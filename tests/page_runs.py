"""Small workdirs by hand: what a run of a few ticks leaves, without running one."""

import json

TICKS = 10


def write_run(folder, **changed):
    """A run of ten ticks with all of its files. changed: files to leave out (None) or replace."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "config.json": json.dumps(config()),
        "versions.json": json.dumps({"device_kind": "cpu", "num_devices": 1, "jax": "0.10.2"}),
        "results.json": json.dumps(results()),
        "stage_value_pretraining.json": json.dumps(pretraining()),
        "metrics.jsonl": lines(metrics()),
        "responses.jsonl": lines(responses(tick) for tick in range(TICKS)),
        "trajectories.jsonl": lines(trajectory(tick, tick % 2 == 1) for tick in range(TICKS)),
        "tripwires.jsonl": lines([tripwire()]),
    } | changed
    for name, text in files.items():
        if text is not None:
            (folder / name).write_text(text)
    return folder


def lines(objects):
    return "".join(json.dumps(one) + "\n" for one in objects)


def config():
    return {
        "name": "small",
        "critic": {"clip": 10.0, "lr": 2.5e-4},
        "recipe": {
            "select": {"kind": "Daps"}, "keep": {"kind": "KeepAll"},
            "advantage": {"kind": "LengthAdaptiveGae"}, "surrogate": {"kind": "Cispo"},
            "guard": {"kind": "MismatchGuard"}, "critic": {"pretraining": "coverage"},
            "responses_per_prompt": 2,
        },
        "task": {"kind": "Ladder"},
        "train": {"num_ticks": TICKS, "batch_prompts": 3},
        "watch": {},
    }  # fmt: skip


def results():
    def half(accuracy):
        by_level = {"steps_2": accuracy, "steps_10": accuracy / 2}
        sampled = {f"held_out/accuracy_{name}": x for name, x in by_level.items()}
        return {
            "sampled": {"held_out/accuracy": accuracy} | sampled,
            "greedy": {"held_out/accuracy": accuracy + 0.05},
        }

    return {"base": half(0.25), "trained": half(0.75)}


def pretraining():
    return {
        "explained_variance": 0.4, "seconds": 61.0,
        "diagnoses": {"ordinary": {"clipped_steps": 0.8, "head_share": 0.99}},
        "coverage": {
            "edges": [0, 5, 10],
            "policies": {
                "early": {"responses": [4, 6], "correct": [1, 3]},
                "late": {"responses": [10, 0], "correct": [5, 0]},
            },
        },
    }  # fmt: skip


def metrics():
    for step in range(1, 7):
        yield {
            "stage": "value_pretraining", "tick": step, "critic_head_grad_norm": 3.0 / step,
            "critic_backbone_grad_norm": 0.5, "critic_clipped_steps": 0.0, "critic_head_share": 0.9,
        }  # fmt: skip
    for tick in range(TICKS):
        yield {
            "stage": "online", "tick": tick, "reward": tick / 10, "success": 0.5, "entropy": 0.3,
            "response_tokens": 6.0, "value_loss": None, "explained_variance": 0.5 - tick / 20,
            "value_r2": float(tick < 5), "v0_calibration_error": 0.1, "tokens_per_second": 100.0,
            "time/rollout": 3.0, "time/critic": 1.0, "time/tick": 4.0, "reference_mid": 0.4,
            "accept/steps_2": 0.5, "accept/steps_10": 1.0, "dropped_groups": 1,
            "coverage/share_0_5": 0.25, "coverage/share_5_10": 0.75,
            "coverage/accuracy_0_5": 0.5, "coverage/accuracy_5_10": None,
        } | ({"held_out/accuracy": 0.2 + tick / 20} if tick % 5 == 0 else {})  # fmt: skip


def responses(tick):
    count = 6
    return {
        "tick": tick, "prompt": list(range(count)), "level": ["steps_2", "steps_10"] * 3,
        "tokens": [2, 3, 4, 5, 6, 7], "stopped": [True] * count,
        "reward": [1.0, -1.0, 1.0, -1.0, -1.0, -1.0],
        "success": [True, False, True, False, False, False],
        "v0": [0.9, 0.5, 0.4, 0.3, -0.5, -0.9], "advantage": [0.1, -1.5, 0.6, -1.3, -0.5, -0.1],
    }  # fmt: skip


def trajectory(tick, success, pieces=("+", "4", "", "\n", "<eos>"), level="steps_2"):
    count, reward = len(pieces), 1.0 if success else -1.0
    values = [round(reward * n / count - 0.1, 3) for n in range(count)]
    return {
        "tick": tick, "response": 3, "prompt": 1, "level": level, "prompt_tokens": [1, 2, 3],
        "prompt_pieces": ["7", "+", "="], "tokens": list(range(count)), "pieces": list(pieces),
        "stopped": True, "reward": reward, "success": success,
        "reason": None if success else "wrong_answer", "value": values,
        "advantage": [reward - value for value in values], "logp_rollout": [-0.25] * count,
        "logp_old": [-0.5] * count, "ratio": [0.7788] * count, "weight": [1.0] * count,
    }  # fmt: skip


def tripwire():
    return {
        "stage": "online", "tick": 7, "wire": "critic_worse_than_constant",
        "verdict": "A constant would do better.", "cause": "Its step size is too large.",
        "knob": "--config.critic.lr=1e-4", "value": -0.3, "threshold": -0.2, "action": "tell",
    }  # fmt: skip
