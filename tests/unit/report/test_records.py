"""Records: what is written is read again, after any kill, and damage is named."""

import json

import pytest

from s3ac_jax.report.records import Header, Record, RecordFile, RecordsError, read

HEADER = Header(
    suite="mine", weights="00c0ffee", version=3, made_with={"seed": 0}, config={"samples": 1},
    problems=2, dropped=["x"],
)  # fmt: skip


def record(problem="a", sample=0, **changes):
    made = Record(
        problem=problem, sample=sample, seed=7, tokens=4, finish="stop", answer="5", correct=True,
        reason="number", same_as=0, letters=None, response="so \\boxed{5}",
    )  # fmt: skip
    return made | changes


def test_what_is_written_is_read_again(tmp_path):
    path = tmp_path / "mine.jsonl"
    assert read(path) == (None, [])
    lines = [record(), record(sample=1, response="\ud800\x00é\n"), record("b")]
    file = RecordFile(path)
    assert file.header is None
    file.begin(HEADER)
    file.append(lines[:2])
    file.append(lines[2:])
    file.close()
    assert read(path) == (HEADER, lines)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [HEADER, *lines]
    again = RecordFile(path)
    assert (again.header, again.records) == (HEADER, lines)
    again.close()


def test_any_torn_end_is_cut_off_and_written_again(tmp_path):
    path = tmp_path / "mine.jsonl"
    file = RecordFile(path)
    file.begin(HEADER)
    lines = [record(sample=n) for n in range(3)]
    file.append(lines)
    file.close()
    whole = path.read_bytes()
    ends = [n + 1 for n, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        there = sum(end <= size for end in ends)
        file = RecordFile(path)
        assert len(file.records) == max(0, there - 1)
        assert (file.header is None) == (there == 0)
        if file.header is None:
            file.begin(HEADER)
        file.append(lines[len(file.records) :])
        file.close()
        assert path.read_bytes() == whole


def test_beginning_anew_forgets(tmp_path):
    file = RecordFile(tmp_path / "mine.jsonl")
    file.begin(HEADER)
    file.append([record()])
    file.begin(HEADER | {"weights": "other"})
    file.append([record("b")])
    file.close()
    assert read(file.path) == (HEADER | {"weights": "other"}, [record("b")])


DAMAGE = {
    "sample": "x", "tokens": True, "correct": 1, "answer": 5, "same_as": "0", "letters": [],
    "response": None, "seed": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    "damage",
    ["no JSON", "[]", '{"problem": "a"}', "", "[" * 100_000]
    + [json.dumps(record(**{name: value})) for name, value in DAMAGE.items()],
)
def test_a_damaged_line_is_named(tmp_path, damage):
    path = tmp_path / "mine.jsonl"
    good = [json.dumps(HEADER), json.dumps(record()), damage, json.dumps(record("b"))]
    path.write_text("\n".join(good) + "\n")
    with pytest.raises(RecordsError, match=r"mine\.jsonl, line 3 is no record.* delete that line"):
        read(path)


@pytest.mark.parametrize(
    "changes", [{"made_with": 3}, {"version": "3"}, {"dropped": {}}, {"weights": None}]
)
def test_a_damaged_header_is_no_line_to_delete(tmp_path, changes):
    path, (name,) = tmp_path / "mine.jsonl", changes
    path.write_text(json.dumps(HEADER | changes) + "\n" + json.dumps(record()) + "\n")
    with pytest.raises(RecordsError, match=rf"line 1 is no record \(has {name} ") as caught:
        read(path)
    assert "delete" not in str(caught.value)
    assert "restore it, or use another --workdir" in str(caught.value)


def test_what_may_be_absent_may_be(tmp_path):
    path = tmp_path / "mine.jsonl"
    line = record(answer=None, same_as=None, letters="ABCD")
    path.write_text(json.dumps(HEADER) + "\n" + json.dumps(line) + "\n")
    assert read(path) == (HEADER, [line])


def test_a_file_of_another_kind_is_left_as_it_is(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"question": 1}\n{"question": 2}')
    with pytest.raises(RecordsError, match=r"line 1 is no record"):
        RecordFile(path)
    assert path.read_text() == '{"question": 1}\n{"question": 2}'
