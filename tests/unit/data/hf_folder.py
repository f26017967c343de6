"""A tokenizer's folder as tests want it: the committed tiny one, and files made on the spot."""

import json
import shutil
from pathlib import Path

TOKENIZER = Path(__file__).resolve().parents[2] / "golden" / "tokenizers" / "tiny"
# Ids of tests/golden/tokenizers/tiny, as tokenizers 0.23.3 lists them.
END_OF_TEXT, IM_START, IM_END, THINK, END_THINK = range(307, 312)


def folder(path, *, change=None, **files):
    """A folder with tokenizer.json, changed by `change(json)`, and the JSON files named."""
    path.mkdir(parents=True, exist_ok=True)
    if change is None:
        shutil.copy(TOKENIZER / "tokenizer.json", path)
    else:
        whole = json.loads((TOKENIZER / "tokenizer.json").read_text())
        change(whole)
        (path / "tokenizer.json").write_text(json.dumps(whole))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def begins_with(number, token):
    """A change that makes the tokenizer's post-processor put `token` first."""

    def change(whole):
        whole["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": token, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
        }

    return change


def without(*tokens):
    """A change that takes added tokens out of the vocabulary."""

    def change(whole):
        kept = [one for one in whole["added_tokens"] if one["content"] not in tokens]
        whole["added_tokens"] = kept

    return change
