"""StudyConfig: arms x seeds, what is compared, and what is drawn; checked when it is made."""

import dataclasses
import re
from typing import Any

from ml_collections.config_dict import ConfigDict

from s3ac_jax.config.boundary import ConfigError, closest, from_config_dict
from s3ac_jax.config.run import RunConfig
from s3ac_jax.report.study_data import METRICS, MORE_METRICS
from s3ac_jax.report.study_table import Comparison


@dataclasses.dataclass(frozen=True)
class Arm:
    """One method or one change of a method, run once per seed.

    recipe: name of the recipe it starts from, for tables only.
    Source: ours.
    """

    name: str
    recipe: str
    run: RunConfig
    seeds: tuple[int, ...]

    @property
    def family(self) -> str:
        """ "single" or "group": whether prompts have one response or several. Source: ours."""
        return "single" if self.run.recipe.responses_per_prompt == 1 else "group"

    def at(self, seed: int) -> RunConfig:
        """The run of this arm under one seed. Source: ours."""
        return dataclasses.replace(self.run, seed=seed)


@dataclasses.dataclass(frozen=True)
class StudyConfig:
    """A study. workers: processes, each on cores of its own. figures: (title, arms), in order.

    cost_baseline: arm that wall times are divided by.
    Raises ValueError naming the fields.
    Source: ours.
    """

    name: str
    workers: int
    arms: tuple[Arm, ...]
    questions: tuple[Comparison, ...]
    figures: tuple[tuple[str, tuple[str, ...]], ...]
    cost_baseline: str

    def __post_init__(self):
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, got {self.workers}")
        if not self.arms:
            raise ValueError("a study needs at least one arm")
        # They name folders and files.
        for name in (*(arm.name for arm in self.arms), *(title for title, _ in self.figures)):
            if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", name):
                raise ValueError(
                    f"{name!r}: names of arms and figures have letters, digits and _ . + - only"
                )
        for number, asked in enumerate(self.questions):
            if asked.metric not in (*METRICS, *MORE_METRICS):
                raise ValueError(
                    f"questions[{number}]: no metric {asked.metric!r}; "
                    f"{closest(asked.metric, (*METRICS, *MORE_METRICS))}"
                )
            ticks = (asked.first, asked.last)
            if not all(type(tick) is int for tick in ticks) or not 0 <= ticks[0] <= ticks[1]:
                raise ValueError(
                    f"questions[{number}]: first and last tick must be ints, 0 <= first <= last, "
                    f"got {ticks}"
                )


_KEYS = (
    "name", "workers", "seeds", "first_seed", "common", "arms", "questions", "figures",
    "cost_baseline",
)  # fmt: skip
_ARM_KEYS = ("run", "seeds")


def study_from_config_dict(cd: ConfigDict) -> StudyConfig:
    """The validated study that `cd` describes.

    {"name", "workers", "seeds": how many, from "first_seed" on, "common": changes of every run,
    "arms": {name: {"run": a whole run's config, "seeds": how many, at most (0 for all)}},
    "questions": [[a, b, metric, first, last, asks]], "figures": [[title, [arm]]], "cost_baseline":
    arm}. Arms run in the order in which the figures name them.

    Raises ConfigError: one line that says what is wrong and where.
    Source: ours.
    """
    for key in cd:
        if key not in _KEYS:
            raise ConfigError(f"unknown key {key}; {closest(key, _KEYS)}")
    for key in _KEYS:
        if key not in cd:
            raise ConfigError(f"missing from the config file: {key}")
    for key, least in (("seeds", 1), ("first_seed", 0)):
        if type(cd[key]) is not int or cd[key] < least:
            raise ConfigError(f"{key} must be an int of at least {least}, got {cd[key]!r}")
    mentioned = _named(cd)
    for where, named in mentioned:
        if named not in cd.arms:
            raise ConfigError(f"{where}: no arm {named!r}; {closest(named, cd.arms)}")
    # A ConfigDict sorts its keys; what the figures show first is wanted first.
    order = dict.fromkeys([named for where, named in mentioned if where.startswith("figures")])
    order |= dict.fromkeys(cd.arms)
    arms = tuple(_arm(name, cd.arms[name], cd) for name in order)
    try:
        return StudyConfig(
            name=cd.name,
            workers=cd.workers,
            arms=arms,
            questions=tuple(Comparison(*row) for row in cd.questions),
            figures=tuple((title, tuple(shown)) for title, shown in cd.figures),
            cost_baseline=cd.cost_baseline,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error


def _named(cd: ConfigDict) -> list[tuple[str, str]]:
    """Every mention of an arm, and where."""
    found = [("cost_baseline", cd.cost_baseline)]
    for number, row in enumerate(cd.questions):
        if len(row) != 6:
            raise ConfigError(
                f"questions[{number}] must be (arm, arm, metric, first tick, last tick, what it "
                f"asks), got {len(row)} entries"
            )
        found += [(f"questions[{number}]", row[0]), (f"questions[{number}]", row[1])]
    for number, row in enumerate(cd.figures):
        if len(row) != 2:
            raise ConfigError(f"figures[{number}] must be (title, arms), got {len(row)} entries")
        found += [(f"figures[{number}]", name) for name in row[1]]
    return found


def _arm(name: str, node: Any, study: ConfigDict) -> Arm:
    for key in node:
        if key not in _ARM_KEYS:
            raise ConfigError(f"unknown key arms.{name}.{key}; {closest(key, _ARM_KEYS)}")
    if "run" not in node:
        raise ConfigError(f"missing from the config file: arms.{name}.run")
    most = node.get("seeds", 0)
    if type(most) is not int or most < 0:
        raise ConfigError(f"arms.{name}.seeds must be an int of at least 0, got {most!r}")
    run = ConfigDict(node.run)
    try:
        run.update(study.common)
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"common does not fit arms.{name}.run: {error}") from error
    try:
        config = from_config_dict(run)
    except ConfigError as error:
        raise ConfigError(f"arms.{name}.run: {error}") from error
    wanted = min(study.seeds, most or study.seeds)
    seeds = range(study.first_seed, study.first_seed + wanted)
    return Arm(name, run.recipe.name, config, tuple(seeds))
