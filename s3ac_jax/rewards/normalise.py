"""One spelling for what reads the same: LaTeX and plain text to a canonical line.

Words stand in quotes afterwards (`12"cm"^2`), so that no later step takes them for products of
variables. Nothing is evaluated here.
"""

import functools
import re
import unicodedata

from s3ac_jax.rewards import words

_QUICK = re.compile(r"[+-]?[0-9]+(?:,[0-9]+)*(?:\.[0-9]+)?")
_SUPER = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUB = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SUPER_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_SUB_RUN = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_SIGNS = {
    "−": "-", "–": "-", "—": "-", "×": "*", "·": "*", "⋅": "*", "∗": "*", "÷": "/", "π": "\\pi ",
    "∞": "\\infty ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "∪": "\\cup ", "∩": "\\cap ",
    "∅": "\\emptyset ", "∈": "\\in ", "°": "\\deg ", "±": "\\pm ", "∓": "\\mp ", "≈": "\\approx ",
    "√": "\\sqrt ", "⌊": "\\lfloor ", "⌋": "\\rfloor ", "⌈": "\\lceil ", "⌉": "\\rceil ",
    "…": "\\dots ", "⋯": "\\dots ", "’": "'", "‘": "'", "“": "", "”": "", "′": "'", "ℝ": "\\bbR ",
    "ℤ": "\\bbZ ", "ℕ": "\\bbN ", "ℚ": "\\bbQ ", "ℂ": "\\bbC ", "⟨": "\\langle ", "⟩": "\\rangle ",
    "⁄": "/", "∕": "/", "£": "", "€": "", "¥": "", '"': "",
}  # fmt: skip
_NAMES = """
alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi
chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega
"""
_GREEK = dict(zip("αβγδεζηθικλμνξρστυφχψωΓΔΘΛΞΠΣΦΨΩ", _NAMES.split(), strict=True))
_TABLE = str.maketrans(_SIGNS | {sign: f"\\{name} " for sign, name in _GREEK.items()})

_TEXT = re.compile(
    r"\\(?:text(?:rm|sf|up|normal|bf|it|tt|sl|md)?|emph|mbox|hbox|mathrm|rm|operatorname)"
    r"\s*\{([^{}]*)\}"
)
_GAP = re.compile(r"(?:\\[,;:! ]|~|\s|\\quad)+$")
_RATE = re.compile(r"[A-Za-z]+/[A-Za-z]+(?:\^\{?[0-9]\}?)?")  # m/s: no quotient of variables
_STYLE = re.compile(
    r"\\(?:(?:textcolor|color|colorbox)\s*\{[^{}]*\}|(?:mathbf|boldsymbol|bm|text(?:bf|it|rm|tt)?|"
    r"emph|mathrm|mathit|mathsf|mathcal|underline|uline|boxed|fbox|bold|bf|it|displaystyle|"
    r"textstyle)"
    r"(?![a-zA-Z]))\s*"
)
_SIZES = re.compile(r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])(?:\.(?![0-9]))?\s*")
_MARKUP = re.compile(r"\\\\|\\\$|\\[()\[\]](?![0-9.]*(?:pt|em|ex)\])|\$")
_SPACES = re.compile(
    r"(?<!\\)\\(?:[,;:!> ]|(?:quad|qquad|thinspace|enspace)(?![a-zA-Z])|hspace\{[^{}]*\})|~"
)
_DOLLARS = re.compile(r"^([-+]?)\\\$ ?([-+]?[0-9](?:[0-9.,{}\\!]*[0-9])?)[.,]?$")
# Digits that TeX sets apart in threes: 1{,}000  1,\!000  10\,080.
_TEX_THOUSANDS = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:(?:\{,\}|, ?\\!|\\[,!]) ?[0-9]{3})+(?![0-9])")
_DEGREES = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])|\\circ\b")
_CELSIUS = re.compile(r'(?<=[0-9])\s*\\deg\s*"?([CF])"?(?![a-zA-Z(])')
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_RENAMED = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom",
    "leq": "le", "leqslant": "le", "geq": "ge", "geqslant": "ge", "neq": "ne", "lbrace": "{",
    "rbrace": "}", "varnothing": "emptyset", "ldots": "dots", "cdots": "dots", "dotsc": "dots",
    "dotsb": "dots", "vdots": "dots", "bigcup": "cup", "infin": "infty", "simeq": "approx",
    "varepsilon": "epsilon", "varphi": "phi", "vartheta": "theta", "lvert": "vert",
    "rvert": "vert", "imath": "i", "exponentialE": "e", "land": "wedge", "lor": "vee",
    "reals": "bbR",
}  # fmt: skip
_SPELLED = {
    "cdot": "*", "times": "*", "ast": "*", "div": "/", "lt": "<", "gt": ">", "lbrack": "[",
    "rbrack": "]", "vert": "|", "mid": "|", "colon": ":", "percent": "%", "i": "i", "e": "e",
    "lparen": "(", "rparen": ")", "land": ",", "euro": "", "texteuro": "", "pounds": "",
    "textdollar": "", "yen": "",
}  # fmt: skip
# Phrases with a sign of their own.
_PHRASES = {
    "percent": "%", "per cent": "%", "pct": "%", "degree": "\\deg ", "degrees": "\\deg ",
    "all real numbers": "\\bbR ", "all reals": "\\bbR ", "real numbers": "\\bbR ",
    "no solution": "\\emptyset ", "no solutions": "\\emptyset ", "empty set": "\\emptyset ",
    "the empty set": "\\emptyset ", "infinity": "\\infty ", "does not exist": '"dne"',
}  # fmt: skip
_WORD = re.compile(r'"[^"]*"|\\(?:begin|end)\{[a-zA-Z]+\}|\\[a-zA-Z]+|[a-zA-Z]{2,}')
_PHRASE = re.compile(r'"([^"]*)"')
_QUOTES = re.compile(r'"[^"]*"(?:\s*"[^"]*")*')
_KEPT_SPACE = re.compile(r"(?<=[0-9.])\s+(?=[0-9.])|(?<=,)\s+|(?<=[a-zA-Z])\s+(?=[a-zA-Z])")
_SINGLE = re.compile(r"([\^_])\{([a-zA-Z0-9])\}(?![0-9.])")
_LEAD = re.compile(r"^(?:=|\\approx|\\sim|\\equiv|\\therefore|\\implies|\\Rightarrow)\s*")


class Refused(Exception):
    """An answer that is none, with the reason code. Source: ours."""


@functools.lru_cache(maxsize=8192)
def normalise(text: str) -> str:
    """The canonical line of an answer; raises Refused for characters that no answer has.

    Source: ours.
    """
    text = text.strip()
    if _QUICK.fullmatch(text):
        return text
    text = " ".join(text.split())
    if not text.isprintable():
        raise Refused("guard_characters")
    if not text.isascii():
        text = _ascii(text)
    text = (
        text.replace('"', "").replace("<=", "\\le ").replace(">=", "\\ge ").replace("!=", "\\ne ")
    )
    text = _DOLLARS.sub(r"\1\2 dollars", text)
    text = text.replace("...", "\\dots ").replace("``", "").replace("\\%", "%")
    text = _TEX_THOUSANDS.sub(lambda run: re.sub(r"[^0-9]", "", run.group()), _wrapping(text))
    if "\\" in text or "$" in text or "~" in text:
        text = _latex(text)
    text = _words(text)
    text = _LEAD.sub("", text.strip().rstrip(".,;: "))
    return _tight(text)


def _ascii(text: str) -> str:
    # Before NFKC, which turns 5² into 52, and 1½ into 11⁄2.
    text = _SUPER_RUN.sub(lambda run: "^{" + run.group().translate(_SUPER) + "}", text)
    text = _SUB_RUN.sub(lambda run: "_{" + run.group().translate(_SUB) + "}", text)
    text = _VULGAR.sub(_vulgar, text)
    text = unicodedata.normalize("NFKC", text.translate(_TABLE)).translate(_TABLE)
    return " ".join(text.split())


def _vulgar(sign: re.Match[str]) -> str:
    over, _, under = unicodedata.normalize("NFKC", sign.group()).partition("⁄")
    return f" \\frac{{{over}}}{{{under}}}"


def _wrapping(text: str) -> str:
    """Without the Markdown around the whole of it."""
    for _ in range(3):
        found = re.fullmatch(r"(\*{1,3}|`)([^*`]+)\1\.?", text)
        if not found:
            break
        text = found.group(2).strip()
    return text


def _latex(text: str) -> str:
    for _ in range(8):  # innermost first
        text, changed = _TEXT.subn(_text, text)
        if not changed:
            break
    text = re.sub(r"\\mathbb\s*(?:\{\s*([A-Z])\s*\}|([A-Z]))", r"\\bb\1\2 ", text)
    text = _STYLE.sub(" ", text)
    text = _SIZES.sub("", text)
    text = _MARKUP.sub(lambda found: "\\\\" if found.group() == "\\\\" else " ", text)
    text = _SPACES.sub(" ", text)
    text = _CELSIUS.sub(r'"\1"', _DEGREES.sub("\\\\deg ", text))
    return _COMMAND.sub(_command, text)


def _command(found: re.Match[str]) -> str:
    name = _RENAMED.get(found.group(1), found.group(1))
    return _SPELLED.get(name, "\\" + name)


def _text(found: re.Match[str]) -> str:
    """The content of \\text{..}: words in quotes, anything else as it is."""
    content = found.group(1).replace("~", " ").replace("\\ ", " ").strip()
    before = _GAP.sub("", found.string[max(0, found.start() - 16) : found.start()])[-1:]
    if len(content) == 1 and content.isalpha():
        # 12\text{m} has a unit, \text{B} alone is a letter, 1/\mathrm{e} a number.
        unit = (before.isdigit() or before == "}") and content not in "ei"
        return f'"{content}"' if unit else f" {content} "
    if re.fullmatch(r"[A-Za-z][A-Za-z .'-]+", content):
        return f'"{words.clean(content)}"'
    if (before.isdigit() or before == "}") and _RATE.fullmatch(content):
        unit, _, rest = content.partition("/")
        return f'"{unit}"/{rest}'
    return f" {content} "


def _words(text: str) -> str:
    """Puts words in quotes and a backslash before the functions that stand without one."""
    text = _QUOTES.sub(_phrases, _WORD.sub(_word, text))
    return _PHRASE.sub(lambda found: _PHRASES.get(found.group(1), found.group()), text)


def _phrases(found: re.Match[str]) -> str:
    """Words side by side in one pair of quotes; "and" and "or" part a list, so they stay apart."""
    phrases: list[str] = []
    for word in " ".join(found.group().split('"')).split():
        if phrases and not {word, phrases[-1].split()[-1]} & {"and", "or"}:
            phrases[-1] += " " + word
        else:
            phrases.append(word)
    return " ".join(f'"{phrase}"' for phrase in phrases)


def _word(found: re.Match[str]) -> str:
    word = found.group()
    if word[0] in '"\\':
        return word
    minutes = word == "min" and found.string[: found.start()].rstrip()[-1:].isdigit()
    if word in words.FUNCTIONS and not minutes:
        return "\\" + word
    if len(word) > 3 or word.lower() in words.SHORT:
        return f'"{word.lower()}"'
    return word


def _tight(text: str) -> str:
    """Without spaces that say nothing, and without braces around the whole or one character."""
    parts = text.split('"')
    # Every second part stands in quotes.
    parts[::2] = [_tight_math(part) for part in parts[::2]]
    text = '"'.join(parts).strip()
    while text.startswith("{") and _closing(text) == len(text) - 1:
        text = text[1:-1].strip()
    return "\\emptyset" if text == "\\{\\}" else text


def _tight_math(text: str) -> str:
    text = _KEPT_SPACE.sub("\0", " ".join(text.split())).replace(" ", "").replace("\0", " ")
    text = _SINGLE.sub(r"\1\2", text).replace("+\\infty", "\\infty")
    # A letter after a command needs its space, two letters of a product do not.
    return re.sub(r"(\\[a-zA-Z]+ (?=[a-zA-Z]))|(?<=[a-zA-Z]) (?=[a-zA-Z])", r"\1", text)


def _closing(text: str) -> int:
    """Where the brace that opens `text` closes, -1 if nowhere."""
    depth = 0
    for place, sign in enumerate(text):
        if sign in "{}" and text[place - 1 : place] != "\\":
            depth += 1 if sign == "{" else -1
            if depth == 0:
                return place
    return -1
