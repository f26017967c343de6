"""Files of JSON lines: whole lines only, cut back on resume, never by another process."""

import json
import math

import pytest

from s3ac_jax.core.errors import RunError
from s3ac_jax.report.lines import LineFile, LinesError, read_lines


@pytest.fixture
def path(tmp_path):
    return tmp_path / "things.jsonl"


def written(path, *lines):
    file = LineFile(path)
    for line in lines:
        file.append(line)
    file.close()


def test_nothing_is_made_before_the_first_line(path):
    file = LineFile(path)
    file.keep(lambda line: True)
    file.close()
    assert not path.exists()
    assert read_lines(path) == []
    file.append({"tick": 0})
    # On disk at once, though the file is still open.
    assert path.read_bytes() == b'{"tick": 0}\n'
    file.close()


def test_lines_come_back_as_they_were(path):
    lines = [
        {"tick": 0, "x": [1, 0.1, None, True], "text": "ä\u2028\r\n\x00", "in": {"a": []}},
        {"tick": -1, "x": 1e-300},
    ]
    written(path, *lines)
    written(path, {"tick": 7})  # behind what is there
    assert read_lines(path) == [*lines, {"tick": 7}]
    assert path.read_bytes().count(b"\n") == 3
    # As any tool reads them.
    assert [json.loads(line) for line in path.read_text().splitlines()] == read_lines(path)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_json_has_not_is_refused_and_leaves_the_file_as_it_is(path, bad):
    written(path, {"tick": 0})
    before = path.read_bytes()
    file = LineFile(path)
    with pytest.raises(ValueError, match="JSON"):
        file.append({"tick": 1, "x": [1.0, bad]})
    file.append({"tick": 2})
    file.close()
    assert path.read_bytes() == before + b'{"tick": 2}\n'


TORN = [b"{", b'{"tick": 1', b'{"tick": 1, "text": "\xc3', b"nul", b'{"tick": 1}']


@pytest.mark.parametrize("torn", TORN)
def test_a_torn_end_is_left_out_and_then_cut_off(path, torn):
    written(path, {"tick": 0})
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    if torn != TORN[-1]:  # torn just before its end: as good as whole
        assert read_lines(path) == [{"tick": 0}]
    # A reader changes nothing, nor does a process that is not to write.
    LineFile(path, writes=False).close()
    assert path.read_bytes() == whole + torn
    written(path, {"tick": 2})
    assert read_lines(path) == [{"tick": 0}, {"tick": 2}]


def test_a_file_of_one_torn_line_begins_anew(path):
    path.write_bytes(b'{"tick": 0, "x"')
    assert read_lines(path) == []
    written(path, {"tick": 0})
    assert read_lines(path) == [{"tick": 0}]


def test_only_what_is_wanted_is_kept(path):
    written(path, *({"tick": t, "stage": "ab"[t % 2]} for t in range(6)))
    file = LineFile(path)
    file.append({"tick": 6, "stage": "a"})
    file.keep(lambda line: line["stage"] == "b" or line["tick"] < 2)
    assert [line["tick"] for line in read_lines(path)] == [0, 1, 3, 5]
    file.append({"tick": 9})  # in the new file, not the one that was open before
    file.close()
    assert [line["tick"] for line in read_lines(path)] == [0, 1, 3, 5, 9]
    assert [one.name for one in path.parent.iterdir()] == ["things.jsonl"]
    file.keep(lambda line: False)
    assert read_lines(path) == []


def test_damage_is_told_with_its_line_and_nothing_is_dropped(path):
    good = b'{"tick": 0}\n'
    for bad in (
        b'{"ti\n',
        b"5\n",
        b"[]\n",
        b"\n",
        b'{"tack": 1}\n',
        b"\xff\n",
        b"[" * 9999 + b"\n",
    ):
        path.write_bytes(good + bad + good)
        said = r"things\.jsonl, line 2 is no line of things; delete that line"
        with pytest.raises(LinesError, match=said) as caught:
            read_lines(path)
        assert isinstance(caught.value, RunError)
        assert "\n" not in str(caught.value)
        with pytest.raises(LinesError, match=said):
            LineFile(path).keep(lambda line: True)
        assert path.read_bytes() == good + bad + good


def test_each_kind_of_line_has_keys_that_it_needs(path):
    written(path, {"tick": 0, "stage": "a"}, {"tick": 1}, {"tick": 2, "stage": "a"})
    assert len(read_lines(path)) == 3
    assert len(read_lines(path, ())) == 3
    with pytest.raises(LinesError, match="line 2"):
        read_lines(path, ("tick", "stage"))


def test_a_process_that_writes_nothing(path):
    silent = LineFile(path, writes=False)
    silent.append({"tick": 0})
    assert not path.exists()
    written(path, {"tick": 0})
    silent.append({"tick": 1, "x": math.nan})
    silent.keep(lambda line: False)
    silent.close()
    assert read_lines(path) == [{"tick": 0}]
    assert silent.path == path
