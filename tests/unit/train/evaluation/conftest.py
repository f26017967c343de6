"""Suites made ready for the fake policy, and closed afterwards."""

import pytest

from s3ac_jax.config.evaluation import EvaluationConfig, SuiteConfig
from s3ac_jax.config.sources import FileSource
from s3ac_jax.train.evaluation.suites import prepare_suites
from tests.unit.train.evaluation.fakes import TOKENIZER, questions


@pytest.fixture
def prepare(tmp_path):
    made = []

    def make(suites=None, held_out=None, grader=None, **changes):
        if suites is None:
            source = FileSource(questions(tmp_path / "mine.jsonl"))
            suites = {"mine": SuiteConfig(source, samples=3, max_response_tokens=24)}
        config = EvaluationConfig(suites, **{"chunk_rows": 4, "bootstrap": 20} | changes)
        made.append(prepare_suites(config, TOKENIZER, None, held_out, grader))
        return made[-1]

    yield make
    for prepared in made:
        prepared.close()
