"""From the config of a source to its problems."""

from typing import Any

from s3ac_jax.config.sources import FileSource, Rows, SourceConfig, SumsSource, TfdsSource
from s3ac_jax.data.files import FileProblems
from s3ac_jax.data.generated import SumsProblems
from s3ac_jax.data.problems import ProblemList, Problems, ProblemsError
from s3ac_jax.data.tfds import TfdsProblems


def problems_of(name: str, config: SourceConfig, *, where: str) -> Problems:
    """The problems that this source holds. name: what reports call them. where: in the config.

    Raises ProblemsError, in one line that begins with `where`. Source: ours.
    """
    try:
        return _read(name, config)
    except ProblemsError as error:
        raise ProblemsError(f"{where}: {error}") from error


def _read(name: str, config: SourceConfig) -> Problems:
    match config:
        case FileSource():
            return FileProblems(config.path, name=name, **_rows(config))
        case TfdsSource():
            found = TfdsProblems(
                config.name, split=config.split, data_dir=config.data_dir, called=name,
                **_rows(config),
            )  # fmt: skip
            # Read once; and two problems with one id would be one problem to whoever records them.
            return ProblemList(name, [found[place] for place in range(len(found))])
        case SumsSource():
            return SumsProblems(
                config.count, seed=config.seed, digits=config.digits, operators=config.operators,
                wordings=config.wordings, held_out=config.held_out, name=name,
            )  # fmt: skip


def _rows(config: Rows) -> dict[str, Any]:
    same = ("question", "answer", "answer_after", "id", "options", "answer_is", "limit")
    return {"kind": config.grade, **{name: getattr(config, name) for name in same}}
