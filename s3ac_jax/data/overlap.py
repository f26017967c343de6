"""Questions that are asked twice, and training questions that an evaluation set asks too."""

import dataclasses
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from s3ac_jax.data.problems import Problem, Problems, shown

WORDS = 13

_SAME = str.maketrans("’‘ʼ−‒–⁄", "'''---/", "$“”„«»—…")
_SUPERSCRIPTS = str.maketrans({sign: f"^{n}" for n, sign in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")})
_TEX_SPACE = re.compile(
    r"\\(?:[,;:!> \n()\[\]]|(?:q?quad|thinspace|left|right|displaystyle|limits)(?![a-z]))|~"
)
_TEX_SAME = re.compile(r"\\[dt]frac(?![a-z])")
# A comma between thousands, in TeX also in braces.
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))")
_BRACED_ONE = re.compile(r"\{\s*(\d+(?:\.\d+)?|[^\W\d_]|\\[a-z]+)\s*\}")
# What carries meaning: numbers, words, signs. "!" only as a factorial, "'" only as a prime or
# inside a word; any other punctuation is left out. A hyphen between words is no minus.
_PART = re.compile(
    r"\d+(?:\.\d+)?|(?<!\d)\.\d+|[^\W\d_]+(?:'[^\W\d_]+)*|(?<=[\d)])!|(?<=\b[^\W\d_])'"
    r"|(?<![^\W\d_]{2})-|-(?![^\W\d_]{2})|[^\w\s.,;:?!'\"`-]|_"
)
_WORD = re.compile(r"\.?\d|[^\W\d_]")


def parts(text: str) -> list[str]:
    """Words, numbers and signs of a question, without what differs between copies of it.

    Not told apart: case, Unicode forms, white space, punctuation of sentences, quotation marks,
    $ signs, TeX's spacing, the thousands comma. Told apart: signs with a meaning, for 3 + 5 is
    not 3 * 5.
    Source: ours.
    """
    # First, for NFKC makes 10² the number 102.
    text = unicodedata.normalize("NFKC", text.translate(_SUPERSCRIPTS)).casefold().translate(_SAME)
    text = _TEX_SAME.sub(r"\\frac", _TEX_SPACE.sub(" ", _THOUSANDS.sub("", text)))
    return _PART.findall(_BRACED_ONE.sub(r" \1 ", text))


@dataclasses.dataclass(frozen=True)
class Kept:
    """What is left of a training set. index: places of the problems that stay, in order.

    duplicates: how many were asked before. leaked: how many each evaluation set asks too, by its
    name. examples: one left-out problem and why, by "duplicates" and the names of the sets.
    Source: ours.
    """

    index: np.ndarray
    duplicates: int
    leaked: Mapping[str, int]
    examples: Mapping[str, str]

    def lines(self) -> list[str]:
        """For the log: a line for each reason to leave something out. Source: ours."""
        counts = {"duplicates": self.duplicates, **self.leaked}
        said = {name: f"also asked by {name}" for name in self.leaked}
        said["duplicates"] = "asked before"
        return [
            f"left out {count} {'question' if count == 1 else 'questions'} {said[name]}, such as "
            f"{self.examples[name]}"
            for name, count in counts.items()
            if count
        ]


def without_overlap(
    train: Problems, held_out: Sequence[Problems] = (), *, duplicates: bool = True
) -> Kept:
    """The problems of `train` that no set of `held_out` asks, each question once.

    One of these sets asks the same when the question is equal but for its form (see `parts`; of a
    multiple choice with the same options), or shares 13 words in a row; questions of fewer words
    are compared as a whole. The first of several equal ones is kept. duplicates: False to keep all.
    Two held-out sets of one name are counted as one.
    Source: exact matches and 13-grams as in GPT-3's decontamination (2005.14165); ours: the form.
    Languages written without spaces have few words to a row, so there mostly equality counts.
    """
    whole: dict[str, str] = {}
    grams: dict[str, str] = {}
    origin: dict[str, str] = {}
    for problems in held_out:
        for place in range(len(problems)):
            problem = problems[place]
            key, words = _forms(problem)
            whole.setdefault(key, problems.name)
            for gram in _grams(words):
                grams.setdefault(gram, problems.name)
                origin.setdefault(gram, problem.id)
            origin.setdefault(key, problem.id)
    index, seen = [], {}
    counts = {"duplicates": 0, **{problems.name: 0 for problems in held_out}}
    examples: dict[str, str] = {}
    for place in range(len(train)):
        problem = train[place]
        key, words = _forms(problem)
        found, reason = key, whole.get(key)
        if reason is None and grams:
            found = next((gram for gram in _grams(words) if gram in grams), "")
            reason = grams.get(found)
        if reason is not None:
            examples.setdefault(reason, _example(problem, origin[found], found))
        elif duplicates and key in seen:
            reason = "duplicates"
            examples.setdefault(reason, _example(problem, seen[key], key))
        if reason is None:
            seen[key] = problem.id
            index.append(place)
        else:
            counts[reason] += 1
    return Kept(np.array(index, np.int64), counts.pop("duplicates"), counts, examples)


def _forms(problem: Problem) -> tuple[str, list[str]]:
    """A question as a whole, its options included, and its words."""
    found = parts(problem.question)
    options = sorted(" ".join(parts(option)) for option in problem.options)
    return "\n".join([" ".join(found), *options]), [one for one in found if _WORD.match(one)]


def _grams(words: list[str]) -> Iterator[str]:
    return (" ".join(words[n : n + WORDS]) for n in range(len(words) - WORDS + 1))


def _example(problem: Problem, other: str, shared: str) -> str:
    return f"{problem.id} (as {other}: {shown(shared, 100)})"
