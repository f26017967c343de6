"""Sets of tensorflow-datasets: written and read back without TensorFlow, faults in one line."""

import subprocess
import sys

import numpy as np
import pytest

from s3ac_jax.data.files import FileProblems
from s3ac_jax.data.problems import Problem, ProblemList, ProblemsError
from s3ac_jax.data.tfds import TfdsProblems, prepare

tensorflow_datasets = pytest.importorskip("tensorflow_datasets", reason="needs the extra data")

CHOICES = [
    Problem("a", "Wählen?", "x", "choice", "mine", ("x", "é")),
    Problem("b", "Two\u2028lines\n?", "2", "choice", "mine", ("1", "2", "3")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a set "mine": 30 questions of GSM8K in order, and two multiple choices."""
    folder = tmp_path_factory.mktemp("tfds")
    splits = {"train": FileProblems("gsm8k_test", limit=30), "odd": ProblemList("x", CHOICES)}
    prepare("mine", splits, folder)
    return folder


def refused(*args, **given):
    with pytest.raises(ProblemsError) as error:
        TfdsProblems(*args, **given)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    return str(error.value)


def test_what_was_written_is_read_in_the_same_order(folder):
    problems = TfdsProblems("mine", data_dir=folder, called="gsm8k_test")
    want = FileProblems("gsm8k_test", limit=30)
    assert (len(problems), problems.name) == (30, "gsm8k_test")
    assert [problems[n] for n in range(30)] == [want[n] for n in range(30)]
    assert problems[-1] == want[29]
    assert problems[17] == want[17]
    assert type(problems[0].question) is str
    for place in (30, -31):
        with pytest.raises(IndexError):
            problems[place]


def test_options_are_read_back(folder):
    given = {"split": "odd", "data_dir": folder, "kind": "choice"}
    problems = TfdsProblems("mine", **given, options="options")
    assert [problems[n] for n in range(2)] == CHOICES
    numbered = TfdsProblems("mine", split="odd", data_dir=folder, id="", called="m")
    assert [numbered[n].id for n in range(2)] == ["m-1", "m-2"]


def test_splits_may_be_sliced(folder):
    problems = TfdsProblems("mine", split="train[10:20]", data_dir=folder)
    assert [problems[n].id for n in range(10)] == [f"gsm8k-test-00{n}" for n in range(10, 20)]
    assert len(TfdsProblems("mine", split="train[:10%]", data_dir=folder)) == 3
    assert len(TfdsProblems("mine:1.0.0", data_dir=folder, limit=7)) == 7


def test_fields_of_other_sets(tmp_path):
    tfds = tensorflow_datasets

    class Other(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        name = "other"
        VERSION = tfds.core.Version("0.1.0")
        code_path = None  # see prepare

        def _info(self):
            features = {
                "q": tfds.features.Text(),
                "more": {
                    "solution": tfds.features.Text(),
                    "value": tfds.features.Scalar(np.float32),
                },
                "label": tfds.features.Scalar(np.int64),
                "wrong": tfds.features.Sequence(tfds.features.Text()),
            }
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            more = {"solution": "so #### 5", "value": 0.5}
            yield 0, {"q": "why?", "more": more, "label": 1, "wrong": ["6", "7"]}
            more = {"solution": "none", "value": 2.0}
            yield 1, {"q": "", "more": more, "label": 0, "wrong": ["6"]}

    Other(data_dir=tmp_path, file_format="array_record").download_and_prepare()

    def first(**given):
        return TfdsProblems("other", data_dir=tmp_path, question="q", **given)[0]

    assert first(answer="more.solution", answer_after="####").answer == "5"
    assert first(answer="more.value").answer == "0.5"
    assert first(answer="label").answer == "1"
    chosen = first(answer="label", answer_is="place", options="wrong", kind="choice")
    assert (chosen.answer, chosen.options) == ("7", ("6", "7"))
    bad = TfdsProblems("other", data_dir=tmp_path, question="q", answer="label")
    with pytest.raises(ProblemsError, match=r"^other \(train\), example 1: field 'q' is empty$"):
        bad[1]
    with pytest.raises(ProblemsError, match="no field 'question'; there are label, more, q, wrong"):
        TfdsProblems("other", data_dir=tmp_path)[0]


def test_what_is_not_there(folder, tmp_path):
    assert "no data set 'none_such' in" in refused("none_such", data_dir=folder)
    assert "no data set 'mine' in" in refused("mine", data_dir=tmp_path)
    assert "no data set 'mine:2.0.0' in" in refused("mine:2.0.0", data_dir=folder)
    assert "Unknown split 'test'" in refused("mine", split="test", data_dir=folder)
    assert "train[:a]" in refused("mine", split="train[:a]", data_dir=folder)
    assert "name a split" in refused("mine", split="", data_dir=folder)
    assert "My Set!" in refused("My Set!", data_dir=folder)
    assert "limit must be at least 1" in refused("mine", data_dir=folder, limit=0)
    assert "mine (train[:0])" in refused("mine", split="train[:0]", data_dir=folder)
    # A set that tensorflow-datasets knows, whose records would need TensorFlow.
    assert "file_format='array_record'" in refused("math_qa", data_dir=folder)


@pytest.mark.parametrize("left", [0.5, 0, 0.99, None])
def test_a_damaged_set(folder, tmp_path, left):
    other = tmp_path / "mine" / "1.0.0"
    other.mkdir(parents=True)
    for file in (folder / "mine" / "1.0.0").iterdir():
        data = file.read_bytes()
        if file.suffix == ".json":
            (other / file.name).write_bytes(data)
        elif left is not None:
            (other / file.name).write_bytes(data[: int(len(data) * left)])
    problems = TfdsProblems("mine", data_dir=tmp_path)
    with pytest.raises(ProblemsError, match=r"^mine \(train\), example 3 can't be read \(.*again$"):
        problems[3]
    (other / "dataset_info.json").write_text("{")
    assert "mine (train)" in refused("mine", data_dir=tmp_path)


def test_what_cannot_be_written(folder, tmp_path):
    some = {"train": ProblemList("x", CHOICES)}
    with pytest.raises(ProblemsError, match="a set can't be called 'My Set'"):
        prepare("My Set", some, tmp_path)
    with pytest.raises(ProblemsError, match="a split can't be called 'a b'"):
        prepare("mine", {"a b": some["train"]}, tmp_path)
    with pytest.raises(ProblemsError, match="at least one split"):
        prepare("mine", {}, tmp_path)
    with pytest.raises(ProblemsError, match="is there already"):
        prepare("mine", some, folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(ProblemsError, match="can't be written"):
        prepare("mine", some, tmp_path / "file")


def test_tensorflow_is_never_imported(folder, tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('TensorFlow was imported')")
    code = (
        "from s3ac_jax.data.tfds import TfdsProblems, prepare\n"
        f"problems = TfdsProblems('mine', data_dir={str(folder)!r})\n"
        f"prepare('again', {{'train': problems}}, {str(tmp_path)!r})\n"
        f"again = TfdsProblems('again', data_dir={str(tmp_path)!r})\n"
        "import sys\n"
        "print(again[3].id, [x for x in sys.modules if x.startswith(('tensorflow.', 'jax.'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True,
        env={"PYTHONPATH": ":".join([str(tmp_path), *sys.path])},
    )  # fmt: skip
    # Before it tensorflow-datasets says what it prepares.
    assert done.stdout.strip().endswith("\ngsm8k-test-0003 []"), done.stderr


def test_without_tensorflow_datasets(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    assert "pip install 's3ac-jax[data]'" in refused("mine", data_dir=tmp_path)
    with pytest.raises(ProblemsError, match="tensorflow-datasets: pip install"):
        prepare("mine", {"train": ProblemList("x", CHOICES)}, tmp_path)
