"""Where questions come from: files, data sets of tensorflow-datasets, and generated ones."""

import dataclasses
from typing import Literal

from s3ac_jax.config.checks import at_least, positive
from s3ac_jax.data.sums import OPERATORS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows with named fields: what a file and a data set have in common.

    question, answer, id: names of the fields. answer_after: what stands before the answer in its
    field ("####"). options: fields of a multiple choice ("A,B,C,D"), or of its wrong options alone;
    empty for none. answer_is: what the answer's field has of them, the "text" of the right one, its
    "letter", or its "place" from 0. grade: "math", "choice" or a grader of yours,
    "module:function". weight: share among the sources. limit: questions taken from the start, None
    for all.
    Source: ours.
    """

    question: str = "prompt"
    answer: str = "answer"
    answer_after: str = ""
    id: str = "id"
    options: str = ""
    answer_is: Literal["text", "letter", "place"] = "text"
    grade: str = "math"
    weight: float = 1.0
    limit: int | None = None

    def __post_init__(self):
        positive("source", self, "weight")
        if self.limit is not None:
            at_least("source", self, limit=1)


@dataclasses.dataclass(frozen=True)
class FileSource(Rows):
    """A JSONL, JSON or CSV file, or the name of a set that ships with the package; see `Rows`.

    Source: ours.
    """

    path: str


@dataclasses.dataclass(frozen=True)
class TfdsSource(Rows):
    """A data set that tensorflow-datasets has prepared, in a format with random access.

    name: as tfds calls it ("my_set", "my_set:1.0.0"). split: may be sliced ("train[:10%]").
    data_dir: where prepared sets are; tfds's own folder when empty. The others: see `Rows`.
    Source: ours, on tensorflow-datasets; TensorFlow itself is not needed.
    """

    name: str
    split: str = "train"
    data_dir: str = ""
    question: str = dataclasses.field(default="question", kw_only=True)


@dataclasses.dataclass(frozen=True)
class SumsSource:
    """Generated sums in words, of numbers with these digits.

    count: how many. wordings: of the question, with {a}, {op} and {b}. held_out: of the quarter of
    all sums that other sources of sums don't hold.
    Source: ours: a source whose difficulty is known.
    """

    count: int
    held_out: bool = False
    digits: tuple[int, ...] = (1, 2)
    operators: str = "+-"
    wordings: tuple[str, ...] = ("What is {a} {op} {b}?",)
    seed: int = 0
    weight: float = 1.0

    def __post_init__(self):
        positive("source", self, "weight")
        at_least("source", self, count=1, seed=0)
        if not self.digits or set(self.digits) - set(range(1, 10)):
            raise ValueError(f"source.digits must be some of 1..9, got {self.digits}")
        check_sums("source", self.operators, self.wordings)


# The first one is meant where a config names no kind.
SourceConfig = FileSource | TfdsSource | SumsSource


def check_sums(section: str, operators: str, wordings: tuple[str, ...]) -> None:
    """Raises ValueError, naming the field, when sums can't be made of these. Source: ours."""
    known = operators and not set(operators) - set(OPERATORS)
    if not known or len(set(operators)) < len(operators):
        raise ValueError(
            f"{section}.operators must be some of {OPERATORS!r}, each once, got {operators!r}"
        )
    if not wordings:
        raise ValueError(f"{section}.wordings must hold at least one wording")
    for wording in wordings:
        if any(wording.count(part) != 1 for part in ("{a}", "{op}", "{b}")) or (
            wording.count("{") + wording.count("}") != 6
        ):
            raise ValueError(
                f"{section}.wordings: {wording!r} must have {{a}}, {{op}} and {{b}}, each once, "
                "and no other braces"
            )
