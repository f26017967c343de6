"""Multiple choice: the one letter that an answer names."""

import re

_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|textcircled|mathrm|mathbf|mathsf|mbox|bf|rm|boxed|fbox|left|"
    r"right)(?![a-zA-Z])|[\"`]"
)
_LABEL = re.compile(r"(?i)^(?:the )?(?:(?:correct |final )?(?:answer|option|choice)(?: is)?:?)\s+")
# "B", "(B)", "[B]", "B.", and with a delimiter also the option's text: "B. 42", "(B) 42".
_LETTER = re.compile(r"^(?:\(([A-Za-z])\)|\[([A-Za-z])\]|([A-Za-z])(?:[.):]|$))[.:]?\s*(.*)$")
# A second letter where a choice could stand, or a word that takes the first one back.
_SECOND = re.compile(
    r"(?:^|[\s,;/&|(\[])(?:([A-Z])(?:[.):\]]|$)|(?:or|and|not|nor|both|either)\s*[(\[]?[A-Z]\b)"
    r"|^\s*(?:or|nor)\b|[,/&|]\s*[A-Z]\b",
)


def letter(answer: str) -> str | None:
    """The letter that `answer` names, in upper case, or None where it is none or more than one.

    An option's text may follow the letter and a delimiter. Two letters, a letter taken back
    ("not B") and an option's text alone name nothing.
    Source: ours.
    """
    if len(answer) > 2000:
        return None
    text = _WRAPPER.sub(" ", answer).replace("$", " ").replace("\\", " ")
    text = text.replace("{", " ").replace("}", " ").replace("*", " ")
    text = re.sub(r"\(\s+|\s+\)", lambda found: found.group().strip(), " ".join(text.split()))
    found = _LETTER.match(_LABEL.sub("", text))
    if not found:
        return None
    named = next(group for group in found.groups()[:3] if group).upper()
    rest = found.group(4)
    if any(second.group(1) != named for second in _SECOND.finditer(rest)):
        return None
    return named
