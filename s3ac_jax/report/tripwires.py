"""Trip wires: rules over a run's metrics that say in plain words what is going wrong, and why."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

Metrics = dict[str, Any]
Action = Literal["tell", "stop", "rollback"]


@dataclasses.dataclass(frozen=True)
class Tripwires:
    """When to call a run sick, and what to do then. A threshold of None switches its wire off.

    action: only tell, stop the run, or go back to the weights of the last good checkpoint and skip
    the prompts in between, at most max_rollbacks times. window: ticks that a wire looks at.

    clipped_steps: share of critic steps that the gradient clip cuts. value_r2: R² of V below which
    a constant would do better. coverage: share of long and right responses among those that the
    critic was pretrained on. entropy_rise, entropy_fall, length_change: factors, against the first
    window. truncated: share of responses that meet the limit. mismatch: mean |log rho| of trainer
    and sampler with the same weights, nats. flat_ticks: ticks without gain in accuracy that
    are too many, flat_gain: what counts as one. all_wrong_ticks: ticks without one right response.
    ungraded: share of responses without a verdict.
    Source: ours; S3AC (2610.35518) for head domination and coverage.
    """

    action: Action = "tell"
    max_rollbacks: int = 3
    window: int = 10
    clipped_steps: float | None = 0.8
    value_r2: float | None = -0.2
    coverage: float | None = 0.01
    entropy_rise: float | None = 2.0
    entropy_fall: float | None = 10.0
    length_change: float | None = 2.0
    truncated: float | None = 0.5
    mismatch: float | None = 0.05
    flat_ticks: int | None = 50
    flat_gain: float = 0.01
    all_wrong_ticks: int | None = 5
    ungraded: float | None = 0.1

    def __post_init__(self):
        counts = {"max_rollbacks": 0, "window": 2, "flat_ticks": 4, "all_wrong_ticks": 2}
        for name, least in counts.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        for name in ("entropy_rise", "entropy_fall", "length_change"):
            value = getattr(self, name)
            if value is not None and not value > 1:
                raise ValueError(f"{name} must be above 1, got {value}")
        for name in ("clipped_steps", "coverage", "truncated", "ungraded", "flat_gain"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} must be in 0..1, got {value}")
        if self.mismatch is not None and not self.mismatch > 0:
            raise ValueError(f"mismatch must be positive, got {self.mismatch}")


class Trip(NamedTuple):
    """A wire that tripped. value: what was measured, against `threshold`. Source: ours."""

    wire: str
    verdict: str
    cause: str
    knob: str
    value: float
    threshold: float


class Coverage(NamedTuple):
    """Responses by length, as counts: bucket k has more than edges[k] tokens and up to edges[k+1].

    Source: S3AC (2610.35518), coverage.
    """

    edges: tuple[int, ...]
    responses: tuple[int, ...]
    correct: tuple[int, ...]


def tripped(
    history: Sequence[Metrics], wires: Tripwires, coverage: Coverage | None = None
) -> list[Trip]:
    """The wires that the newest tick of `history` trips.

    history: metrics of the ticks of online training, oldest first, as in metrics.jsonl (a value
    may be missing or None). coverage: of what the critic was pretrained on, None for no
    pretraining.
    Source: ours.
    """
    ticks = [line for line in history if "reward" in line]
    found = [rule(ticks, wires) for rule in _RULES] if ticks else []
    found.append(_coverage_missing(ticks, wires, coverage))
    return [trip for trip in found if trip is not None]


def tripped_in_pretraining(
    steps: Sequence[Metrics], wires: Tripwires, success_rates: dict[str, float]
) -> list[Trip]:
    """The wires that value pretraining trips: its steps so far, and how often policies were right.

    Source: S3AC (2610.35518), head domination; ours.
    """
    found = [_head_dominates(steps, wires)]
    if wires.all_wrong_ticks is not None and success_rates and not any(success_rates.values()):
        names = ", ".join(success_rates)
        found.append(
            Trip(
                "verifier_failing",
                f"not one response of the policies ({names}) was right in value pretraining",
                _VERIFIER_CAUSE, _VERIFIER_KNOB, 0.0, 0.0,
            )
        )  # fmt: skip
    return [trip for trip in found if trip is not None]


def _series(history: Sequence[Metrics], name: str) -> np.ndarray:
    """The values of a metric that are there and finite."""
    values = [line.get(name) for line in history]
    return np.array([v for v in values if v is not None and math.isfinite(v)], float)


def _mean(history: Sequence[Metrics], name: str) -> float:
    values = _series(history, name)
    return float(values.mean()) if len(values) else math.nan


def _gain(history: Sequence[Metrics], window: int) -> float:
    """How much accuracy rose from the first window to the last: held-out, or else in training.

    Selection moves the training prompts towards those of middling difficulty, so training success
    may stand still while the policy learns.
    """
    held_out = _series(history, "held_out/accuracy")
    if len(held_out) > 1:
        return float(held_out[-1] - held_out[0])
    return _mean(history[-window:], "success") - _mean(history[:window], "success")


def _head_dominates(history: Sequence[Metrics], wires: Tripwires) -> Trip | None:
    recent, limit = history[-wires.window :], wires.clipped_steps
    clipped = _series(recent, "critic_clipped_steps")
    if limit is None or len(clipped) < wires.window or clipped.mean() < limit:
        return None
    share, loss = _mean(recent, "critic_head_share"), _mean(recent, "value_loss")
    begins = f"the gradient clip cuts {100 * clipped.mean():.0f} % of the critic's steps"
    knob = (
        "--config.critic.head_std=None (1/(hidden size + 1)) and --config.critic.clip=10, with "
        "another --workdir: the critic has to be pretrained again"
    )
    if share >= 0.9:
        verdict = (
            f"{begins}, and the value head has {100 * share:.0f} % of its squared gradient norm: "
            "the backbone hardly learns"
        )
        cause = "a fresh head whose gradient is far above that of the backbone, under a small clip"
    else:
        verdict = (
            f"{begins}: the value head is too large for it (value loss {loss:.2f}, head "
            f"{100 * share:.0f} % of the squared norm, the rest sent back by its weights)"
        )
        cause = "a value head that starts with large weights, so that V starts as noise"
    return Trip("head_dominates", verdict, cause, knob, float(clipped.mean()), limit)


def _critic_worse_than_constant(history: Sequence[Metrics], wires: Tripwires) -> Trip | None:
    recent, limit = history[-wires.window :], wires.value_r2
    fit = _series(recent, "value_r2")
    # One tick of nearly equal outcomes says nothing: the median, over enough of them.
    if limit is None or len(recent) < wires.window or len(fit) < wires.window / 2:
        return None
    middle = float(np.median(fit))
    if middle >= limit:
        return None
    bias = _mean(recent, "value_mean_error")
    return Trip(
        "critic_worse_than_constant",
        f"a constant would predict outcomes better than the critic does (R² {middle:.2f}, median "
        f"of {len(fit)} ticks; V is {bias:+.2f} off on average)",
        "the policy moves faster than the critic follows, or the critic learns other outcomes than "
        "those that come",
        "--config.critic.lr higher or --config.actor.lr lower, "
        "--config.recipe.critic.warmup_ticks=10",
        middle, limit,
    )  # fmt: skip


def _coverage_missing(
    history: Sequence[Metrics], wires: Tripwires, coverage: Coverage | None
) -> Trip | None:
    limit, recent = wires.coverage, history[-wires.window :]
    if limit is None or coverage is None or not recent or not sum(coverage.responses):
        return None
    total = sum(coverage.responses)
    for number, edge in enumerate(coverage.edges[:-1]):
        names = [coverage_name(*pair) for pair in _pairs(coverage.edges)[number:]]
        shares = [_series(recent, f"coverage/share_{name}") for name in names]
        rates = [_series(recent, f"coverage/accuracy_{name}") for name in names]
        now = sum(
            float(share.mean() * rate.mean())
            for share, rate in zip(shares, rates, strict=True)
            if len(share) and len(rate)
        )
        known = sum(coverage.correct[number:]) / total
        # A share that is too small online is no matter; what is large has to have been seen.
        if known < limit and now >= max(5 * limit, 0.05):
            return Trip(
                "coverage_missing",
                f"{100 * now:.0f} % of the responses have more than {edge} tokens and are right; "
                f"of those that the critic was pretrained on {100 * known:.1f} % were",
                "the critic was pretrained on policies that hardly ever answer long and right",
                "--config.value_pretraining.early_prompts and .middle_prompts above 0 (policies "
                "of several strengths), --config.recipe.critic.pretraining=coverage",
                known, limit,
            )  # fmt: skip
    return None


def _pairs(edges: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(edges))


def coverage_name(low: int, high: int) -> str:
    """What the metrics call responses of more than `low` tokens, up to `high`. Source: ours."""
    return f"{low}_{high}"


def _entropy_runs_away(history: Sequence[Metrics], wires: Tripwires) -> Trip | None:
    window = wires.window
    if len(history) < 2 * window:
        return None
    first, now = (_mean(part, "entropy") for part in (history[:window], history[-window:]))
    if not first > 0:
        return None
    if wires.entropy_rise is not None and now > wires.entropy_rise * first:
        return Trip(
            "entropy_runs_away",
            f"entropy is {now:.3g} nats per token, {now / first:.1f} times what it was at first",
            "the policy loses what it knew: steps too large, or advantages that are mostly noise",
            "--config.actor.lr lower, --config.actor.clip lower, or a recipe with entropy control",
            now / first, wires.entropy_rise,
        )  # fmt: skip
    # A policy that has learnt the task is certain too.
    if (
        wires.entropy_fall is not None
        and now < first / wires.entropy_fall
        and _gain(history, window) < wires.flat_gain
    ):
        return Trip(
            "entropy_runs_away",
            f"entropy fell to {now:.2g} nats per token, {now / first:.2g} of what it was, and "
            "accuracy did not rise",
            "the policy has settled on one way to answer before it found a good one",
            "--config.actor.lr lower, --config.recipe.surrogate.eps_high higher, or a recipe with "
            "entropy control",
            first / max(now, 1e-12), wires.entropy_fall,
        )  # fmt: skip
    return None


def _length_runs_away(history: Sequence[Metrics], wires: Tripwires) -> Trip | None:
    window, recent = wires.window, history[-wires.window :]
    cut = _mean(recent, "truncated")
    if wires.truncated is not None and len(recent) == window and cut > wires.truncated:
        return Trip(
            "length_runs_away",
            f"{100 * cut:.0f} % of the responses meet the length limit and count as wrong",
            "the limit is too short for the task, or the policy has stopped ending its answers",
            "--config.rollout.max_response_tokens higher; a recipe with overlong punishment",
            cut, wires.truncated,
        )  # fmt: skip
    if wires.length_change is None or len(history) < 2 * window:
        return None
    first, now = (_mean(part, "response_tokens") for part in (history[:window], recent))
    factor = now / first if first else math.nan
    if not (factor > wires.length_change or factor < 1 / wires.length_change):
        return None
    # Longer, or shorter, and better is what one hopes for.
    if not _gain(history, window) < wires.flat_gain:
        return None
    grew = factor > 1
    return Trip(
        "length_runs_away",
        f"responses have {now:.0f} tokens, {factor:.2g} times what they had at first, and accuracy "
        "did not rise",
        "length pays by itself (a token-mean loss favours it)" if grew
        else "the policy answers before it has worked the answer out: guessing pays, or the steps "
        "are too large",
        "--config.actor.lr lower, --config.recipe.average (how responses are averaged)",
        max(factor, 1 / max(factor, 1e-12)), wires.length_change,
    )  # fmt: skip


def _sampler_disagrees(history: Sequence[Metrics], wires: Tripwires) -> Trip | None:
    limit = wires.mismatch
    # Weights that made the tokens are those that the trainer reads with, so nothing was learnt in
    # between: as at learning rate 0.
    recent = history[-max(wires.window, 3) :]
    same = [line for line in recent if not line.get("staleness")]
    apart = _series(same[-3:], "mismatch_abs_log")
    if limit is None or len(apart) < 3 or apart.mean() <= limit:
        return None
    kept = _mean(same[-3:], "mismatch_kept")
    return Trip(
        "sampler_disagrees",
        f"with the same weights, sampler and trainer differ by {apart.mean():.3g} nats per token "
        f"({100 * (1 - kept):.1f} % of the tokens are rejected)",
        "another precision or kernel in the sampler, weights that did not arrive, experts routed "
        "anew, or a temperature applied on one side alone",
        "--config.rollout.weights=model, .kv_dtype=auto, --config.recipe.replay_routing=True, and "
        "the versions of a remote server",
        float(apart.mean()), limit,
    )  # fmt: skip


def _reward_flat(history: Sequence[Metrics], wires: Tripwires) -> Trip | None:
    ticks = wires.flat_ticks
    if ticks is None or len(history) < ticks:
        return None
    recent = history[-ticks:]
    name = "held_out/accuracy"
    values = _series(recent, name)
    if len(values) < 4:
        name, values = "success", _series(recent, "success")
    if len(values) < 4:
        return None
    half = len(values) // 2
    before, after = float(values[:half].mean()), float(values[half:].mean())
    # What is solved can't be solved better.
    if after - before >= wires.flat_gain or after >= 0.95:
        return None
    what = "held-out accuracy" if name.startswith("held") else "success in training"
    return Trip(
        "reward_flat",
        f"{what} did not rise over the last {ticks} ticks ({100 * before:.1f} % -> "
        f"{100 * after:.1f} %)",
        "converged; or updates too small, most tokens rejected, or groups without a difference",
        "--config.actor.lr higher, a look at mismatch_kept, dropped_groups and advantage_std",
        after - before, wires.flat_gain,
    )  # fmt: skip


_VERIFIER_CAUSE = (
    "the verifier rejects everything (answers in another form than it reads, or a fault in it), or "
    "the task is beyond the base policy"
)
_VERIFIER_KNOB = (
    "grade one right answer by hand; read trajectories.jsonl (--dump_trajectories=4); take easier "
    "prompts"
)


def _verifier_failing(history: Sequence[Metrics], wires: Tripwires) -> Trip | None:
    recent = history[-wires.window :]
    lost = _mean(recent, "ungraded")
    # Not for one bad tick at the start.
    if wires.ungraded is not None and len(recent) >= min(3, wires.window) and lost > wires.ungraded:
        return Trip(
            "verifier_failing",
            f"{100 * lost:.0f} % of the responses got no verdict",
            "graders that hang or die, or a rollout server that gives up",
            "--config.task.graders higher, the time limit of the grader, the servers' logs",
            lost, wires.ungraded,
        )  # fmt: skip
    ticks = wires.all_wrong_ticks
    if ticks is None or len(history) < ticks:
        return None
    success = _series(history[-ticks:], "success")
    if len(success) == ticks and success.max() == 0:
        return Trip(
            "verifier_failing",
            f"not one response was right in {ticks} ticks",
            _VERIFIER_CAUSE, _VERIFIER_KNOB, 0.0, 0.0,
        )  # fmt: skip
    every = _series(history, "success")
    if len(every) >= ticks and every.min() == 1:
        return Trip(
            "verifier_failing",
            f"every response was right in all {len(every)} ticks from the first on",
            "the verifier accepts everything, or the base policy can do the task already",
            "grade one wrong answer by hand; harder prompts",
            1.0, 1.0,
        )  # fmt: skip
    return None


_Rule = Callable[[Sequence[Metrics], Tripwires], Trip | None]
_RULES: tuple[_Rule, ...] = (
    _head_dominates, _critic_worse_than_constant, _entropy_runs_away, _length_runs_away,
    _sampler_disagrees, _reward_flat, _verifier_failing,
)  # fmt: skip
