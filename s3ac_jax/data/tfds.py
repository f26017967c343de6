"""Problems of data sets that tensorflow-datasets has prepared, and preparing one from a file.

TensorFlow is never imported: only formats with random access are read (array_record).
"""

import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from s3ac_jax.data.fields import Fields, Number
from s3ac_jax.data.problems import Problem, Problems, ProblemsError, at, shown

_NAME = re.compile(r"[a-z][a-z0-9_]*")


class TfdsProblems:
    """Problems of a prepared data set, each read from disk when it is asked for.

    name: as tensorflow-datasets calls the set ("my_set", "my_set/config:1.0.0"). split: may be
    sliced ("train[:10%]"). data_dir: where prepared sets are, its own folder when empty. called:
    what reports call it; the name when empty. limit: only so many from the start. The others: see
    `Fields`.
    Raises ProblemsError when the set or split isn't there; a problem that can't be used raises it
    when it is asked for, and nothing looks for ids that come twice: ProblemList(name, list(...))
    reads all, once, and does.
    Source: ours, on tfds.data_source.
    """

    def __init__(
        self,
        name: str,
        *,
        split: str = "train",
        data_dir: str | os.PathLike[str] = "",
        called: str = "",
        question: str = "question",
        answer: str = "answer",
        id: str = "id",
        options: str = "",
        kind: str = "math",
        answer_after: str = "",
        answer_is: str = "text",
        limit: int | None = None,
    ):
        self._fields = Fields(question, answer, id, options, kind, answer_after, answer_is)
        if limit is not None and limit < 1:
            raise ProblemsError(f"{name}: limit must be at least 1, got {limit}")
        self._where = f"{name} ({split})"
        self._source = _source(name, split, str(data_dir))
        self._size = min(len(self._source), limit or len(self._source))
        if not self._size:
            raise ProblemsError(f"{self._where} holds no problems")
        self.name = called or name

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: int) -> Problem:
        place = at(place, self._size)
        where = f"{self._where}, example {place}"
        try:
            found = self._source[place]
        # A damaged file shows itself in as many ways as there are layers below.
        except Exception as error:
            said = " ".join(str(error).split())
            raise ProblemsError(
                f"{where} can't be read ({shown(said, 200)}); prepare the data set again"
            ) from error
        row = {name: _plain(value) for name, value in found.items()}
        return self._fields.problem(row, where, self.name, place + 1)


def prepare(name: str, splits: Mapping[str, Problems], data_dir: str | os.PathLike[str]) -> None:
    """Writes problems as the data set `name` that tensorflow-datasets reads from `data_dir`.

    splits: "train" and others by name, FileProblems say. The order stays. TfdsProblems reads it
    back with question="question", answer="answer", id="id" and, if there are options,
    options="options"; the kind is not written.
    Raises ProblemsError when a name can't be used or the set is there already.
    Source: ours, a builder for tensorflow-datasets.
    """
    tfds = _tfds(name)
    for what, one in (("set", name), *(("split", split) for split in splits)):
        if not _NAME.fullmatch(one):
            raise ProblemsError(
                f"a {what} can't be called {one!r}: small letters, digits and _, a letter first"
            )
    if not splits:
        raise ProblemsError(f"{name}: give at least one split to write")
    folder = pathlib.Path(data_dir)
    if (there := folder / name / "1.0.0").exists():
        raise ProblemsError(f"{there} is there already; remove it or use another name")

    def rows(problems: Problems) -> Iterator[tuple[int, dict[str, Any]]]:
        for place in range(len(problems)):
            one = problems[place]
            yield (
                place,
                {
                    "id": one.id,
                    "question": one.question,
                    "answer": one.answer,
                    "options": list(one.options),
                },
            )

    text = tfds.features.Text

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")
        # Where tfds would look for checksums of downloads, with a package that it does not name
        # among its requirements (importlib_resources).
        code_path = None

        def _info(self) -> Any:
            # With the package's metadata tfds would look for a README beside this module.
            return tfds.core.DatasetInfo(
                builder=self,
                features=tfds.features.FeaturesDict(
                    {
                        "id": text(),
                        "question": text(),
                        "answer": text(),
                        "options": tfds.features.Sequence(text()),
                    }
                ),
                disable_shuffling=True,
            )

        def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
            return {split: rows(problems) for split, problems in splits.items()}

        def _generate_examples(self) -> Any:
            raise AssertionError("every split brings its own rows")

    Builder.name = name
    try:
        Builder(data_dir=folder, file_format="array_record").download_and_prepare()
    except OSError as error:
        raise ProblemsError(f"{folder / name} can't be written: {error.strerror}") from error


def _source(name: str, split: str, data_dir: str) -> Any:
    tfds = _tfds(name)
    if not split:
        raise ProblemsError(f"{name}: name a split, as in split='train'")
    where = data_dir or "the folder of tensorflow-datasets"
    try:
        return tfds.data_source(name, split=split, data_dir=data_dir or None, download=False)
    except tfds.core.registered.DatasetNotFoundError as error:
        raise ProblemsError(
            f"no data set {name!r} in {where}; prepare it with tensorflow-datasets (for a file: "
            "s3ac_jax.data.tfds.prepare) and give its folder as data_dir"
        ) from error
    except NotImplementedError as error:
        raise ProblemsError(
            f"{name} in {where} is not prepared with random access; prepare it with "
            "file_format='array_record'"
        ) from error
    # Its faults with names, splits and damaged folders come as many kinds.
    except Exception as error:
        said = " ".join(str(error).split())
        raise ProblemsError(f"{name} ({split}) in {where}: {said[:200]}") from error


def _plain(value: Any) -> Any:
    """A value of tfds as Fields reads it."""
    if isinstance(value, np.ndarray):
        return [_plain(one) for one in value.tolist()]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return Number(value)
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return value


def _tfds(name: str) -> Any:
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise ProblemsError(
            f"{name} needs the package tensorflow-datasets: pip install 's3ac-jax[data]'"
        ) from error
    return tensorflow_datasets
