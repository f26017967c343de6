"""From the config of a source to its problems."""

from s3ac_jax.config.sources import FileSource, SourceConfig, SumsSource, TfdsSource
from s3ac_jax.data.files import FileProblems
from s3ac_jax.data.generated import SumsProblems
from s3ac_jax.data.problems import ProblemList, Problems
from s3ac_jax.data.tfds import TfdsProblems


def problems_of(name: str, config: SourceConfig) -> Problems:
    """The problems that this source holds; name: what reports call them.

    Raises ProblemsError, in one line. Source: ours.
    """
    match config:
        case FileSource():
            return FileProblems(
                config.path, name=name, question=config.question, answer=config.answer,
                id=config.id, options=config.options, kind=config.grade,
                answer_after=config.answer_after, answer_is=config.answer_is, limit=config.limit,
            )  # fmt: skip
        case TfdsSource():
            found = TfdsProblems(
                config.name, split=config.split, data_dir=config.data_dir, called=name,
                question=config.question, answer=config.answer, id=config.id,
                options=config.options, kind=config.grade, answer_after=config.answer_after,
                answer_is=config.answer_is, limit=config.limit,
            )  # fmt: skip
            # Read once; and two problems with one id would be one problem to whoever records them.
            return ProblemList(name, [found[place] for place in range(len(found))])
        case SumsSource():
            return SumsProblems(
                config.count, seed=config.seed, digits=config.digits, operators=config.operators,
                wordings=config.wordings, held_out=config.held_out, name=name,
            )  # fmt: skip
