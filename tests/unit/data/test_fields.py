"""Rows with named fields: what becomes a problem, and which line says what is wrong with others."""

import pytest

from s3ac_jax.data.fields import Fields
from s3ac_jax.data.problems import Problem, ProblemsError

QUESTION = {"prompt": "Which?", "id": "q"}


def made(row, **fields):
    return Fields(**fields).problem(row, "file, line 7", "set", 3)


def test_a_row_becomes_a_problem():
    row = {"prompt": " What is 1 + 1?\n", "answer": "2 ", "id": "x", "more": None}
    assert made(row) == Problem("x", "What is 1 + 1?", "2", "math", "set", ())


def test_ids_are_numbers_where_rows_have_none():
    row = {"prompt": "?", "answer": "2"}
    assert made(row).id == "set-3"
    assert made(row | {"id": 12}).id == "12"
    assert made(row | {"id": "x"}, id="").id == "set-3"
    with pytest.raises(ProblemsError, match=r"line 7: no field 'uid'; there are prompt, answer$"):
        made(row, id="uid")
    with pytest.raises(ProblemsError, match=r"no field 'prompt'; there are a b, c$"):
        made({"a\nb": 1, "c": 2})


def test_fields_may_lie_inside_others():
    row = {
        "prompt": [{"role": "user", "content": "What?"}],
        "reward_model": {"ground_truth": "34"},
        "a.b": "plain names go first",
        "a": {"b": "no"},
    }
    found = made(row, question="prompt.0.content", answer="reward_model.ground_truth")
    assert (found.question, found.answer) == ("What?", "34")
    assert made(row, question="a.b", answer="a.b").answer == "plain names go first"
    for field in ("prompt.1.content", "prompt.0.text", "reward_model.ground_truth.x"):
        with pytest.raises(ProblemsError, match="no field"):
            made(row, question=field)


def test_the_answer_after_a_mark():
    row = {"prompt": "?", "answer": "5 - 3 = 2\n#### 3\nno:\n#### 1,234\n"}
    assert made(row, answer_after="####").answer == "1,234"
    for answer in ("42", "#### 3 ####", "####  "):
        with pytest.raises(ProblemsError, match="nothing stands after '####' in field 'answer'"):
            made(row | {"answer": answer}, answer_after="####")


@pytest.mark.parametrize(
    ("value", "said"),
    [(None, "must be text, got None"), (True, "must be text, got True"), (1.5, "must be text"),
     ([], r"must be text, got \[\]"), ({}, "must be text"), ("", "is empty"), (" \n", "is empty"),
     ("a\0b", "NUL"), ("\ud83d", "lone surrogate"), (b"\xff", "not UTF-8")],
)  # fmt: skip
def test_what_is_no_text_is_named(value, said):
    for field in ("prompt", "answer", "id"):
        row = {"prompt": "a", "answer": "b", "id": "c"} | {field: value}
        with pytest.raises(ProblemsError, match=f"^file, line 7: field '{field}' .*{said}"):
            made(row)


@pytest.mark.parametrize("row", [[], "text", 3, None])
def test_a_row_must_have_fields(row):
    with pytest.raises(ProblemsError, match=r"^file, line 7: must be an object"):
        made(row)


def test_options_are_all_or_the_wrong_ones():
    options = ["red", "green", "blue"]
    listed = {**QUESTION, "choices": options, "answer": "green"}
    found = made(listed, options="choices", kind="choice")
    assert (found.options, found.answer, found.kind) == (tuple(options), "green", "choice")
    wrong = {**QUESTION, "answer": "green", "w 1": "red", "w 2": "blue"}
    found = made(wrong, options="w 1, w 2", kind="choice")
    assert (found.options, found.answer) == (("green", "red", "blue"), "green")
    letters = {**QUESTION, "A": "red", "B": "green", "answer": "B"}
    assert made(letters, options="A,B", kind="choice", answer_is="letter").answer == "green"
    place = {**QUESTION, "choices": ["1", "2", "3"], "answer": 1}
    assert made(place, options="choices", kind="choice", answer_is="place").answer == "2"


@pytest.mark.parametrize(
    ("row", "fields", "said"),
    [
        ({"answer": "B", "o": ["red", "blue"]}, {}, "'B' is none of the options; if it is the let"),
        ({"answer": "2", "o": ["red", "blue"]}, {}, "answer_is='letter' or 'place'"),
        ({"answer": "C", "o": ["red", "blue"]}, {"answer_is": "letter"}, "'C' is not the letter"),
        ({"answer": "b", "o": ["red", "blue"]}, {"answer_is": "letter"}, "'b' is not the letter"),
        ({"answer": "2", "o": ["red", "blue"]}, {"answer_is": "place"}, "'2' is not the place"),
        ({"answer": "red", "o": ["red", "red"]}, {}, "right option 'red' is there twice"),
        ({"answer": "red", "o": ["red"]}, {}, "2 to 26 options, got 1"),
        ({"answer": "red", "o": "red"}, {}, "field 'o' must be a list of options, got 'red'"),
        ({"answer": "red", "o": ["red", 1.5]}, {}, "an option of 'o' must be text"),
        ({"answer": "red"}, {}, "no field 'o'"),
    ],
)
def test_options_that_make_no_sense(row, fields, said):
    with pytest.raises(ProblemsError, match=said):
        made({**QUESTION, **row}, options="o", kind="choice", **fields)


def test_a_choice_without_options_needs_a_letter():
    assert made({**QUESTION, "answer": "C"}, kind="choice").answer == "C"
    with pytest.raises(ProblemsError, match="must be a capital letter, got '17'"):
        made({**QUESTION, "answer": "17"}, kind="choice")


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"kind": "maths"}, "'math', 'choice' or 'module:function', got 'maths'"),
     ({"kind": "a b:c"}, "module:function"), ({"kind": ":f"}, "module:function"),
     ({"options": "o"}, "judged as 'choice'"), ({"question": ""}, "field with the question"),
     ({"answer": ""}, "field with the answer"), ({"answer_is": "number"}, "answer_is must be one"),
     ({"answer_is": "letter"}, "needs the fields of the options")],
)  # fmt: skip
def test_settings_that_make_no_sense(fields, said):
    with pytest.raises(ProblemsError, match=said):
        Fields(**fields)
    assert Fields(kind="my.module:grade").kind == "my.module:grade"
