"""What a run found, in lines and table rows for people."""

import math
from typing import Any

import numpy as np

from s3ac_jax.rewards.verifier import Verifier
from s3ac_jax.train.build import Parts

ENOUGH_EXPLAINED_VARIANCE = 0.3


def pretraining_lines(facts: dict[str, Any]) -> list[str]:
    """What value pretraining found. Source: S3AC (2610.35518), stabilised critic."""
    rates = ", ".join(f"{name} {100 * rate:.0f} %" for name, rate in facts["success_rates"].items())
    lines = [f"critic pretrained on policies that succeed: {rates}"]
    settings = {"ordinary": "head std 1/sqrt(H), clip 1", "s3ac": "head std 1/(H+1), clip 10"}
    for name, found in facts["diagnoses"].items():
        lines.append(
            f"first critic steps, {settings[name]}: head has {100 * found['head_share']:.1f} % of "
            f"the squared gradient norm, {100 * found['clipped_steps']:.0f} % of steps clipped, "
            f"value loss {found['value_loss']:.3f}"
        )
    explained = facts["explained_variance"]
    if math.isnan(explained):
        return [
            *lines,
            "at the start of online training all outcomes of the base policy are equal: there is "
            "nothing for the critic to explain yet",
        ]
    verdict = "above" if explained > ENOUGH_EXPLAINED_VARIANCE else "NOT above"
    lines.append(
        f"at the start of online training the critic explains {explained:.2f} of the variance of "
        f"the base policy's outcomes, {verdict} {ENOUGH_EXPLAINED_VARIANCE}"
    )
    return lines


def outcome_lines(
    outcomes: dict[str, dict[str, dict[str, float]]], verifier: Verifier
) -> list[str]:
    """How base and trained policy did on held-out problems. Source: ours."""
    lines = []
    for name, kinds in outcomes.items():
        sampled, greedy = kinds["sampled"], kinds["greedy"]
        bare = {key.removeprefix("held_out/"): value for key, value in sampled.items()}
        line = (
            f"{name}: held-out {100 * bare['accuracy']:.1f} % sampled, "
            f"{100 * greedy['held_out/accuracy']:.1f} % greedy"
        )
        remark = verifier.remark(bare)
        lines.append(f"{line}; {remark}" if remark else line)
    return lines


def table_rows(
    parts: Parts, outcomes: dict[str, dict[str, dict[str, float]]]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows by difficulty level and totals, for `report.table`. Source: ours."""
    base, after = outcomes["base"]["sampled"], outcomes["trained"]["sampled"]
    prompts = parts.held_out.prompts
    levels, called = prompts.levels, prompts.called
    present = [int(level) for level in np.unique(levels)]
    # What the task reports by level beside the accuracy.
    some = f"_{called.names[present[0]]}"
    shares = [
        name.removeprefix("held_out/").removesuffix(some) for name in after if name.endswith(some)
    ]

    def row(suffix: str, problems: int) -> dict[str, Any]:
        cells: dict[str, Any] = {"problems": problems}
        for name in shares:
            cells[f"base_{name}"] = base[f"held_out/{name}{suffix}"]
            cells[name] = after[f"held_out/{name}{suffix}"]
        return cells

    rows = [
        {
            "level": called.labels[level],
            **row(f"_{called.names[level]}", int((levels == level).sum())),
        }
        for level in present
    ]
    return rows, row("", len(levels))
