"""The final answer of a response: what stands in its last box."""

import re

_TOKEN = re.compile(r"\\\\|\\[{}]|\\[fb]?box(?:ed)?(?![a-zA-Z])\s*\{?|[{}]")
_BOXES = frozenset({"\\boxed", "\\fbox"})
# What may stand between the boxes of one list: \boxed{3}, \boxed{4} and \boxed{5}.
_BETWEEN = re.compile(
    r"(?:[\s,;.$&]|\\[,;:!()\[\]]|\\quad|\\qquad|\\text\s*\{\s*(?:and|or),?\s*\}|\b(?:and|or)\b)*"
)
_MAX_GAP, _MAX_BOXES = 40, 64


def final_answer(response: str, kind: str = "math") -> tuple[str | None, str]:
    """(text of the last box, "") or (None, why there is none), in one pass over the response.

    Only what follows the last `</think>` counts, and nothing in a response that still thinks. A
    box inside another belongs to it, and boxes with nothing but separators between them are one
    list: three guesses in a row are a list of three. Without a box there is no answer: any other
    place of the text could be a number that the response came across.
    Source: ours.
    """
    del kind  # a letter is boxed like a number
    end = response.rfind("</think>")
    if response.find("<think>", max(end, 0)) >= 0:
        return None, "unfinished_think"
    boxes, last_open = _boxes(response, _first(response, end + len("</think>") if end >= 0 else 0))
    if last_open:
        return None, "unterminated_box"
    if not boxes:
        return None, "no_box"
    texts = [response[boxes[-1][1] : boxes[-1][2]].strip()]
    for before, after in zip(boxes[-2::-1], boxes[:0:-1], strict=True):
        gap = response[before[2] + 1 : after[0]]
        if len(gap) > _MAX_GAP or len(texts) > _MAX_BOXES or not _BETWEEN.fullmatch(gap):
            break
        text = response[before[1] : before[2]].strip()
        if text and text not in texts:
            texts.append(text)
    return (", ".join(reversed(texts)), "") if texts[0] else (None, "empty_box")


def _first(text: str, start: int) -> int:
    """Where the first box begins, with the backslashes before it; braces before that are prose."""
    places = [place for name in _BOXES if (place := text.find(name, start)) >= 0]
    first = min(places, default=len(text))
    while first > start and text[first - 1] == "\\":
        first -= 1
    return first


def _boxes(text: str, start: int) -> tuple[list[tuple[int, int, int]], bool]:
    """(command, content start, content end) of closed outermost boxes; is the last one open?"""
    stack: list[tuple[int, int] | None] = []
    closed: list[tuple[int, int, int]] = []
    last_begun = last_closed = -1
    for token in _TOKEN.finditer(text, start):
        found = token.group()
        if found == "{":
            stack.append(None)
        elif found == "}":
            box = stack.pop() if stack else None
            if box is not None:
                while closed and closed[-1][0] > box[0]:
                    closed.pop()
                closed.append((*box, token.start()))
                last_closed = max(last_closed, box[0])
        elif found.rstrip("{ \t\r\n") in _BOXES:
            last_begun = token.start()
            # A box without braces holds one character in TeX: nobody means that.
            if found.endswith("{"):
                stack.append((token.start(), token.end()))
        elif found.endswith("{") and found != "\\{":
            stack.append(None)
    return closed, last_begun > last_closed
