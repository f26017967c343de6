"""From a row with named fields to a problem: the part that files and tfds sets share."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from s3ac_jax.data.problems import Problem, ProblemsError, shown

_GRADER = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_ANSWERS = ("text", "letter", "place")
# An id of that name is used where rows have it; any other name was asked for.
_USUAL_ID = "id"


class Number(str):
    """A number as a file spells it: 0.10 stays 0.10, however many digits it has.

    Source: ours: what is graded is text, and floats would round it.
    """


@dataclasses.dataclass(frozen=True)
class Fields:
    """Names of the fields of a row, and how answers are meant.

    Names may lead inside: "reward_model.ground_truth", "prompt.0.content". answer_after: the answer
    is what follows the last of these ("####"); empty: all of the field. id: empty to number the
    rows. options: empty for none, else a field with a list of them, or fields "A,B,C" with one
    each; they are all options or only the wrong ones. answer_is: "text" of the right option, its
    "letter", or its "place" counted from 0. kind: as in `Problem`.
    Raises ProblemsError naming the setting.
    Source: ours.
    """

    question: str = "prompt"
    answer: str = "answer"
    id: str = _USUAL_ID
    options: str = ""
    kind: str = "math"
    answer_after: str = ""
    answer_is: str = "text"

    def __post_init__(self):
        for name in ("question", "answer"):
            if not getattr(self, name):
                raise ProblemsError(f"the name of the field with the {name} is missing")
        if self.kind not in ("math", "choice") and not _GRADER.fullmatch(self.kind):
            raise ProblemsError(
                "how answers are judged must be 'math', 'choice' or 'module:function', got "
                f"{self.kind!r}"
            )
        if self.options and self.kind == "math":
            raise ProblemsError("options need answers judged as 'choice', got 'math'")
        if self.answer_is not in _ANSWERS:
            raise ProblemsError(f"answer_is must be one of {_ANSWERS}, got {self.answer_is!r}")
        if self.answer_is != "text" and not self.options:
            raise ProblemsError(f"answer_is={self.answer_is!r} needs the fields of the options")

    def problem(self, row: Any, where: str, name: str, number: int) -> Problem:
        """The problem in this row, the `number`th (from 1) of the set called `name`.

        Raises ProblemsError beginning with `where`, naming the field.
        Source: ours.
        """
        if not isinstance(row, Mapping):
            raise ProblemsError(f"{where}: must be an object with fields, got {shown(row)}")
        question = self._text(row, self.question, where)
        answer = self._text(row, self.answer, where)
        if self.answer_after:
            _, found, answer = answer.rpartition(self.answer_after)
            if not (found and answer.strip()):
                raise ProblemsError(
                    f"{where}: nothing stands after {self.answer_after!r} in field {self.answer!r}"
                )
            answer = answer.strip()
        options = self._options(row, where)
        if options:
            options, answer = self._chosen(options, answer, where)
        elif self.kind == "choice" and not re.fullmatch(r"[A-Z]", answer):
            raise ProblemsError(
                f"{where}: the answer of a multiple choice must be a capital letter, got "
                f"{shown(answer)}; where the options have fields of their own, name these"
            )
        return Problem(
            self._id(row, where, name, number), question, answer, self.kind, name, options
        )

    def _id(self, row: Mapping[str, Any], where: str, name: str, number: int) -> str:
        if not self.id or (self.id == _USUAL_ID and _USUAL_ID not in row):
            return f"{name}-{number}"
        return self._text(row, self.id, where)

    def _options(self, row: Mapping[str, Any], where: str) -> tuple[str, ...]:
        names = [one.strip() for one in self.options.split(",") if one.strip()]
        if len(names) != 1:
            return tuple(self._text(row, one, where) for one in names)
        found = _inside(row, names[0], where)
        if not isinstance(found, Sequence) or isinstance(found, (str, bytes)):
            raise ProblemsError(
                f"{where}: field {names[0]!r} must be a list of options, got {shown(found)}"
            )
        return tuple(checked(one, f"{where}: an option of {names[0]!r}") for one in found)

    def _chosen(
        self, options: tuple[str, ...], answer: str, where: str
    ) -> tuple[tuple[str, ...], str]:
        """All options, and the text of the right one."""
        place = None
        if self.answer_is == "letter" and re.fullmatch(r"[A-Z]", answer):
            place = ord(answer) - ord("A")
        elif self.answer_is == "place" and re.fullmatch(r"\d{1,3}", answer):
            place = int(answer)
        if self.answer_is != "text":
            if place is None or place >= len(options):
                raise ProblemsError(
                    f"{where}: {shown(answer)} is not the {self.answer_is} of one of "
                    f"{len(options)} options"
                )
            answer = options[place]
        elif answer not in options:
            if re.fullmatch(r"[A-Z]|\d", answer):
                raise ProblemsError(
                    f"{where}: {answer!r} is none of the options; if it is the letter or the place "
                    "of one, say so with answer_is='letter' or 'place'"
                )
            options = (answer, *options)
        if options.count(answer) > 1:
            raise ProblemsError(f"{where}: the right option {shown(answer)} is there twice")
        if not 2 <= len(options) <= 26:
            raise ProblemsError(f"{where}: must have 2 to 26 options, got {len(options)}")
        return options, answer

    def _text(self, row: Mapping[str, Any], field: str, where: str) -> str:
        return checked(_inside(row, field, where), f"{where}: field {field!r}")


def checked(value: Any, where: str) -> str:
    """`value` as text without white space around it. Raises ProblemsError beginning with `where`.

    Source: ours.
    """
    if isinstance(value, bytes):  # tfds gives text as bytes
        try:
            value = value.decode()
        except UnicodeDecodeError as error:
            raise ProblemsError(f"{where} is not UTF-8 ({error.reason})") from error
    elif isinstance(value, int) and not isinstance(value, bool):
        value = Number(value)
    if not isinstance(value, str):
        raise ProblemsError(f"{where} must be text, got {shown(value)}")
    text = value.strip()
    if not text:
        raise ProblemsError(f"{where} is empty")
    if "\0" in text:
        raise ProblemsError(f"{where} holds a NUL character; the file is damaged")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ProblemsError(
            f"{where} holds half a character ({text[error.start]!r}, a lone surrogate)"
        ) from error
    return text


def _inside(row: Mapping[str, Any], field: str, where: str) -> Any:
    """The value of a field, or of one inside others; the plain name goes first."""
    if field in row:
        return row[field]
    found: Any = row
    for part in field.split("."):
        if isinstance(found, Mapping) and part in found:
            found = found[part]
        elif isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        else:
            raise ProblemsError(f"{where}: no field {field!r}; there are {shown_names(row)}")
    return found


def shown_names(names: Iterable[object], most: int = 200) -> str:
    """Names of fields for a message: on one line and not long. Source: ours."""
    said = " ".join(", ".join(map(str, names)).split()) or "no fields"
    return said if len(said) <= most else said[: most - 3] + "..."
