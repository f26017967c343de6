"""The words that matter to a grader: functions, units, and words that change a number's meaning."""

import re

# Written without their backslash they are still no products of variables.
_FUNCTIONS = """
sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt pi infty binom frac
max min gcd lcm mod
"""
FUNCTIONS = frozenset(_FUNCTIONS.split())
# Two and three letters that are words; other short runs are products (xy, abc).
_SHORT = """
or and if is am pm no yes of in to at by on as an it for the not but all odd any one two six ten
cm mm km kg mg ml dm ft yd lb lbs oz mi hr hrs min sec cal usd eur gbp day men hz pts th st nd rd
mph kph so we get red our are has box boy cat dog pen egg via mod non nor only bit few set sum cup
cups can per sq pct dne nil
"""
SHORT = frozenset(_SHORT.split())
# With one of these a number is no longer that number: 5 thousand, 5 or more, 12 pm.
_ALTERING = """
hundred hundreds thousand thousands million millions billion billions trillion trillions dozen
dozens score gross pair pairs couple half halves third thirds quarter quarters fourth fourths
fifth fifths sixth sixths seventh sevenths eighth eighths ninth ninths tenth tenths hundredth
hundredths thousandth thousandths zero one two three four five six seven eight nine ten eleven
twelve twenty thirty forty fifty sixty seventy eighty ninety percent cent negative minus plus
times squared cubed factorial double triple twice choose modulo mod base binary octal hex
hexadecimal and or nor not no never except but if unless when otherwise else either neither both
maybe perhaps possibly to between from less more fewer greater than least most over under above
below up down am pm a.m. p.m. noon midnight o'clock approximately about around roughly almost
nearly off root wrong false incorrect is equals any all none bc ad ago of with without tens twos
fives hundredweight th st nd rd
"""
ALTERING = frozenset(_ALTERING.split())
_ALIASES = {
    "hrs": "hour", "hr": "hour", "mins": "minute", "min": "minute", "secs": "second",
    "sec": "second", "lbs": "pound", "lb": "pound", "ft": "foot", "feet": "foot", "in": "inch",
    "inches": "inch", "people": "person", "centimeter": "cm", "meter": "m", "kilometer": "km",
    "kilogram": "kg", "gram": "g", "usd": "dollar",
}  # fmt: skip
_POWER = r"(?:\^\{?-?[0-9]\}?)?"
_UNIT = re.compile(rf'"([a-z][a-z .\'-]*|[a-zA-Z])"({_POWER}(?:[/*]"?[a-zA-Z]+"?{_POWER})?)$')
_VARIABLE = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]+")
_OPENINGS = re.compile(
    r'^"(?:so|thus|hence|therefore|is|we get|equals|usd|eur|gbp|'
    r'(?:the )?(?:final )?answer(?: is)?)"[:=]?'
)
# Area = 12 and total: 12 name what 12 is.
_LABEL = re.compile(r'^"([a-z .\'-]+)"[:=]')


def clean(content: str) -> str:
    """Words in lower case with single spaces; p.m. as pm. Source: ours."""
    text = " ".join(content.split())
    if len(text) > 1:
        text = text.lower()
    return text.replace("a.m.", "am").replace("p.m.", "pm").strip(". ")


def opened(text: str) -> str:
    """`text` without an opening such as "so", "the answer is" or "area =". Source: ours."""
    label = _LABEL.match(text)
    if label and not any(word in ALTERING for word in label.group(1).split()):
        return text[label.end() :] or text
    return _OPENINGS.sub("", text) or text


def unit_of(text: str) -> tuple[str, str]:
    """(body, unit in a canonical form); no unit where the words change what the body says.

    Source: ours: any noun is a unit (18 eggs), as GSM8K's answers have thousands of them, but not
    a word that makes another number of it.
    """
    found = _UNIT.search(text)
    # n is prime: what follows a variable says something about it.
    if not found or not found.start() or _VARIABLE.search(text[: found.start()]):
        return text, ""
    named = found.group(1).split()
    if len(named) > 4 or any(word.strip(".'") in ALTERING for word in named):
        return text, ""
    unit = " ".join(
        _ALIASES.get(word, _ALIASES.get(_single(word), _single(word))) for word in named
    )
    return text[: found.start()], unit + re.sub(r'[{}"]', "", found.group(2))


def _single(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
