"""Sources of a config: whatever holds the problems, each has an id of its own and is read once."""

import collections
from typing import ClassVar

import pytest

from s3ac_jax.config.sources import FileSource, SumsSource, TfdsSource
from s3ac_jax.data.problems import Problem, ProblemsError
from s3ac_jax.train import sources
from tests.unit.train.evaluation.fakes import questions


class OnDisk:
    """A prepared data set, as tfds reads it. reads: how often each problem was."""

    reads: ClassVar = collections.Counter()
    ids = ("a", "b", "c")

    def __init__(self, name, *, called, **_):
        self.name = called

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, place):
        OnDisk.reads[place] += 1
        return Problem(self.ids[place], f"question {place}", "1")


def test_a_prepared_set_is_read_once(monkeypatch):
    monkeypatch.setattr(sources, "TfdsProblems", OnDisk)
    OnDisk.reads.clear()
    found = sources.problems_of("mine", TfdsSource("set"), where="here")
    for _ in range(3):
        assert [found[place].id for place in range(len(found))] == ["a", "b", "c"]
    assert OnDisk.reads == {0: 1, 1: 1, 2: 1}


def test_ids_of_a_prepared_set_that_come_twice_are_told(monkeypatch):
    monkeypatch.setattr(sources, "TfdsProblems", OnDisk)
    monkeypatch.setattr(OnDisk, "ids", ("a", "b", "a"))
    with pytest.raises(ProblemsError, match="mine: problems 1 and 3 have the same id 'a'"):
        sources.problems_of("mine", TfdsSource("set"), where="here")


def test_files_and_sums(tmp_path):
    found = sources.problems_of(
        "mine", FileSource(questions(tmp_path / "q.jsonl"), limit=2), where="here"
    )
    assert (found.name, [found[place].id for place in range(2)], len(found)) == (
        "mine", ["q0", "q1"], 2,
    )  # fmt: skip
    sums = sources.problems_of("sums", SumsSource(5), where="here")
    assert (sums.name, len({sums[place].id for place in range(5)})) == ("sums", 5)


def test_a_fault_is_told_with_its_place_in_the_config():
    with pytest.raises(ProblemsError, match=r"^task\.train\.a: 'no\.jsonl' is missing"):
        sources.problems_of("a", FileSource("no.jsonl"), where="task.train.a")
