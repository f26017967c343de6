"""Files: what each form gives, and one line about each way in which one can be bad."""

import csv
import hashlib
import json

import pytest

from s3ac_jax.data.files import SETS, FileProblems, shipped
from s3ac_jax.data.problems import ProblemsError

ROWS = [
    {"id": "a", "prompt": "What is 1 + 1?", "answer": "2"},
    {"id": "b", "prompt": 'Two\nlines, a "quote"\u2028and é', "answer": "1,000"},
]
LINES = "\n".join(map(json.dumps, ROWS)) + "\n"


def written(folder, data, name="some.jsonl"):
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def rows(problems):
    return [
        {"id": one.id, "prompt": one.question, "answer": one.answer}
        for one in (problems[place] for place in range(len(problems)))
    ]


def refused(path, **fields):
    with pytest.raises(ProblemsError) as error:
        FileProblems(path, **fields)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    return str(error.value)


def as_csv(folder):
    path = folder / "some.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["answer", "id", "prompt"])
        writer.writeheader()
        writer.writerows(ROWS)
    return path


def test_every_form_gives_the_same_problems(tmp_path):
    raw = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    for path in (
        written(tmp_path, LINES),
        written(tmp_path, raw, "no_newline.jsonl"),
        written(tmp_path, b"\xef\xbb\xbf" + LINES.encode(), "bom.jsonl"),
        written(tmp_path, LINES.replace("\n", "\r\n"), "crlf.jsonl"),
        written(tmp_path, "\n \n" + LINES.replace("\n", "\n\n"), "blank.jsonl"),
        written(tmp_path, LINES, "lines.json"),
        written(tmp_path, json.dumps(ROWS, indent=1), "array.json"),
        written(tmp_path, LINES, "any.txt"),
        as_csv(tmp_path),
    ):
        problems = FileProblems(path)
        assert rows(problems) == ROWS
        assert problems.name == problems[0].source == path.stem
    assert FileProblems(tmp_path / "some.jsonl", name="mine", limit=1).name == "mine"
    assert rows(FileProblems(str(tmp_path / "some.jsonl"), limit=1)) == ROWS[:1]
    assert rows(FileProblems(tmp_path / "some.jsonl", limit=9)) == ROWS


def test_the_original_form_of_gsm8k(tmp_path):
    # The first line of openai/grade-school-math, grade_school_math/data/test.jsonl, but for length.
    line = (
        r'{"question": "Janet\u2019s ducks lay 16 eggs per day. ...", "answer": "Janet sells '
        r"16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day.\nShe makes 9 * 2 = $<<9*2=18>>18 every day at"
        r' the farmer\u2019s market.\n#### 18"}'
    )
    path = written(tmp_path, line, "test.jsonl")
    (found,) = [FileProblems(path, question="question", answer_after="####")[0]]
    assert (found.id, found.answer) == ("test-1", "18")
    assert found.question == "Janet’s ducks lay 16 eggs per day. ..."


def test_numbers_stay_as_they_are_spelled(tmp_path):
    for spelled in ("0.10", "-7", "1e3", "9" * 5000, "3.14159265358979323846"):
        path = written(tmp_path, f'{{"prompt": "?", "answer": {spelled}}}')
        assert FileProblems(path)[0].answer == spelled


def test_what_a_path_can_be(tmp_path):
    sets = "gsm8k_test, gsm8k_train_2k, imo_answerbench_v2"
    assert ", ".join(shipped()) == sets
    for path in ("gsm8k", str(tmp_path / "none.jsonl"), "a\0b", "x" * 5000, "", "~nobody-at-all/x"):
        said = refused(path)
        assert sets in said
        assert "give the path of a file" in said
    assert "is a folder" in refused(tmp_path)
    assert "is missing" in refused(tmp_path / "none")
    assert "is no file" in refused("/dev/null")
    assert "write it as JSON lines" in refused(written(tmp_path, b"PAR1", "train.parquet"))


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv"])
@pytest.mark.parametrize("data", ["", "\n\n", "\ufeff"])
def test_empty_files(tmp_path, name, data):
    assert refused(written(tmp_path, data, name)).endswith("x" + name[1:] + " holds no problems")


def test_a_header_alone_and_an_empty_array(tmp_path):
    for path in (written(tmp_path, "id,prompt\n", "a.csv"), written(tmp_path, "[]", "a.json")):
        assert refused(path) == f"{path} holds no problems"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (LINES + LINES[:40], "line 3: no JSON"),
        (LINES + "\0\0\0\0", "line 3: no JSON"),
        (LINES + '{"prompt": "a\0b", "answer": "1"}', "line 3: no JSON"),
        (LINES + '{"prompt": "a\\u0000b", "answer": "1"}', "line 3: field 'prompt' holds a NUL"),
        (LINES + '{"prompt": "a\\ud800b", "answer": "1"}', "line 3: field 'prompt' holds half a"),
        (LINES.encode() + b'{"prompt": "caf\xe9"}', "line 3: not UTF-8 at byte 16"),
        (LINES.encode("utf-16"), "line 1: not UTF-8 at byte 1"),
        (LINES + "[" * 100_000, "line 3: no JSON"),
        (LINES + '["prompt"]', "line 3: must be an object with fields, got ['prompt']"),
        (LINES + "17", "line 3: must be an object"),
        (LINES + '{"prompt": "c", "id": "c"}', "line 3: no field 'answer'; there are prompt, id"),
        (LINES + "{}", "line 3: no field 'prompt'; there are no fields"),
        (LINES + '{"prompt": "c", "answer": " "}', "line 3: field 'answer' is empty"),
        (LINES + '{"prompt": "c", "answer": null}', "line 3: field 'answer' must be text, got N"),
        (LINES + '{"prompt": "c", "answer": NaN}', "line 3: no JSON (NaN"),
        (LINES + '{"prompt": ["c"], "answer": "1"}', "line 3: field 'prompt' must be text, got ["),
        (LINES + LINES, "line 3: field 'id' has 'a' as {path}, line 1 has"),
    ],
)  # fmt: skip
def test_bad_lines_are_named(tmp_path, data, said):
    path = written(tmp_path, data)
    found = refused(path)
    assert found.startswith(f"{path}, {said.format(path=path)}"[:400])
    if isinstance(data, str):
        assert len(FileProblems(path, limit=2)) == 2  # what is not read is no fault


def test_many_fields_are_not_all_named(tmp_path):
    row = json.dumps({f"field {n}": n for n in range(1000)})
    assert "..." in refused(written(tmp_path, row))
    assert "..." in refused(written(tmp_path, '{"prompt": ["' + "x" * 10_000 + '"]}'))


def test_a_huge_line_is_read(tmp_path):
    row = {"prompt": "x" * 10_000_000, "answer": "1"}
    assert len(FileProblems(written(tmp_path, json.dumps(row)))[0].question) == 10_000_000


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("id,prompt,answer\na,b,1\nc,d\n", "line 3: 2 values for 3 fields (id, prompt, answer)"),
        ("id,prompt,answer\na,b, or c,1\n", "line 2: 4 values for 3 fields"),
        ('id,prompt,answer\na,"b\nb",1\nc,"d,1\n', "line 4: no CSV (unexpected end of data)"),
        ('id,prompt,answer\na,"b"b,1\n', "line 2: no CSV"),
        ("id,prompt,id\na,b,1\n", "line 1: field 'id' is named twice"),
        ('id,prompt,answer\na,"b\nb",1\nc,,1\n', "line 4: field 'prompt' is empty"),
        ("question,answer\na,1\n", "line 2: no field 'prompt'; there are question, answer"),
        ("prompt,answer\n" + "x" * 200_000 + ",1\n", "line 2: no CSV (field larger"),
        (b"prompt,answer\ncaf\xe9,1\n", "not UTF-8 at byte 18"),
    ],
)  # fmt: skip
def test_bad_csv_is_named(tmp_path, data, said):
    path = written(tmp_path, data, "x.csv")
    joint = ": " if said.startswith("not") else ", "
    assert refused(path).startswith(f"{path}{joint}{said}")


def test_bad_json_is_named(tmp_path):
    path = written(tmp_path, json.dumps(ROWS)[:-1], "x.json")
    assert refused(path).startswith(f"{path}: no JSON")
    assert "entry 2: must be an object" in refused(written(tmp_path, '[{"a": 1}, 2]', "y.json"),
                                                   question="a", answer="a")  # fmt: skip
    assert "must be an array" in refused(written(tmp_path, '"text"', "z.json"))


def test_an_unreadable_file_and_a_limit_of_nothing(tmp_path):
    path = written(tmp_path, LINES)
    assert "limit must be at least 1, got 0" in refused(path, limit=0)
    path.unlink()
    path.symlink_to(path)
    assert "some.jsonl" in refused(path)


# Of the files as they were handed over: other copies of these sets are other sets.
@pytest.mark.parametrize(
    ("name", "number", "last", "digest"),
    [("gsm8k_train_2k", 2000, ("gsm8k-train-7465", "150"), "92f434e757370af7"),
     ("gsm8k_test", 1319, ("gsm8k-test-1318", "14"), "e138ec749d0ca8af"),
     ("imo_answerbench_v2", 400, ("imo-bench-number_theory-100", "20"), "a3a1d62807f9cf3a")],
)  # fmt: skip
def test_sets_that_come_with_the_package(name, number, last, digest):
    problems = FileProblems(name)
    assert (problems.name, len(problems)) == (name, number)
    assert (problems[-1].id, problems[-1].answer) == last
    assert hashlib.sha256((SETS / f"{name}.jsonl").read_bytes()).hexdigest()[:16] == digest
    notice = (SETS / "LICENCES.md").read_text()
    assert f"{name}.jsonl" in notice
    assert "Copyright (c) 2021 OpenAI" in notice
    assert "Copyright 2025 Google LLC" in notice
