"""The page of a run: whole, self-contained, safe, and never indispensable of a file."""

import base64
import hashlib
import html.parser
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from s3ac_jax.core.errors import RunError
from s3ac_jax.report.page import embedded, page, within, write_page
from s3ac_jax.report.page_data import PageError, read_runs
from tests.page_runs import lines, responses, trajectory, write_run

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
HOSTILE = "</script><img src=x onerror=alert(1)>$\\frac"


class Elements(html.parser.HTMLParser):
    """Start tags with their attributes, and the text of scripts."""

    def __init__(self, text):
        super().__init__()
        self.found, self.scripts, self._script = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._script = tag == "script"

    def handle_data(self, data):
        if self._script:
            self.scripts.append(data)
            self._script = False

    def values(self, name):
        return [attrs[name] for _, attrs in self.found if name in attrs]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "a")


@pytest.fixture(scope="module")
def text(run_folder):
    return write_page([run_folder]).read_text()


def test_it_stands_in_the_workdir_alone(run_folder, text):
    assert text == (run_folder / "report.html").read_text()
    assert not list(run_folder.glob("*.tmp"))
    for told in ("Does V(s₀) know", "Held-out accuracy", "--config.critic.lr=1e-4"):
        assert told in text
    assert "not measured: responses.jsonl" not in text


def test_equal_runs_give_equal_pages(run_folder, text):
    assert page(read_runs([run_folder])) == text


def test_it_asks_the_network_for_nothing(text):
    elements = Elements(text)
    for name in ("src", "href", "xlink:href", "action", "data"):
        assert all(x.startswith(("#", "data:")) for x in elements.values(name))
    assert not re.search(r"url\((?!#)|@import", text)
    policy = next(x for x in elements.values("content") if "default-src" in x)
    assert "default-src 'none'" in policy
    digest = base64.b64encode(hashlib.sha256(elements.scripts[-1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy


def test_ids_are_unique_and_references_resolve(text):
    elements = Elements(text)
    ids = elements.values("id")
    assert len(set(ids)) == len(ids)
    targets = [x[1:] for x in elements.values("href") + elements.values("xlink:href") if x[1:]]
    targets = [x for x in targets if not x.startswith("ata:")] + re.findall(
        r"url\(#([^)]*)\)", text
    )
    assert targets
    assert set(targets) <= set(ids)


def test_text_of_models_runs_and_levels_stays_text(tmp_path):
    line = trajectory(0, True, pieces=(HOSTILE, "x"), level=HOSTILE)
    some = responses(0) | {"level": [HOSTILE] * 6, "v0": None}
    metric = {"stage": "online", "tick": 0, "time/tick": 1.0, f"accept/{HOSTILE}": 0.5}
    metric[f"held_out/accuracy_{HOSTILE}"] = metric["held_out/accuracy"] = 0.5
    folder = write_run(
        tmp_path, **{
            "config.json": json.dumps({"name": HOSTILE}), "metrics.jsonl": lines([metric]),
            "trajectories.jsonl": lines([line]), "responses.jsonl": lines([some]),
        },
    )  # fmt: skip
    text = write_page([folder]).read_text()
    elements = Elements(text)
    assert "img" not in {tag for tag, _ in elements.found}
    assert not any(name.startswith("on") for _, attrs in elements.found for name in attrs)
    data = next(script for script in elements.scripts if script.startswith("{"))
    assert json.loads(data)["responses"][0]["pieces"] == [HOSTILE, "x"]


def test_embedded_json_ends_no_element():
    data = {"a": "</script><!-- & \u2028"}
    assert not set(embedded(data)) & set("<>&\u2028")
    assert json.loads(embedded(data)) == data


def test_no_file_but_the_metrics_is_indispensable(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    text = write_page([tmp_path]).read_text()
    assert "not finished: 0 ticks" in text
    assert "not measured: trajectories.jsonl" in text
    assert "<svg" not in text
    assert (
        "nan" not in re.sub(r"<(style|script).*?</\1>", "", text, flags=re.DOTALL).lower().split()
    )


def test_null_numbers_are_gaps(tmp_path):
    line = trajectory(0, False) | {"value": None, "ratio": [None] * 5, "reward": None}
    keys = {"stage": "online", "tick": 0, "time/tick": 1.0}
    nothing = dict.fromkeys(["reward", "entropy", "explained_variance", "reference_mid",
                             "coverage/share_0_5", "accept/steps_2"])  # fmt: skip
    folder = write_run(
        tmp_path, **{
            "metrics.jsonl": lines([keys | nothing]), "trajectories.jsonl": lines([line]),
            "responses.jsonl": lines([responses(0) | {"v0": [None] * 6, "advantage": [None] * 6}]),
            "stage_value_pretraining.json": None, "results.json": None,
        },
    )  # fmt: skip
    text = write_page([folder]).read_text()
    assert "no critic gave a V(s₀)" in text
    assert "no long response failed" in text


def test_several_runs_are_laid_over_each_other(tmp_path, run_folder):
    config = json.loads((run_folder / "config.json").read_text())
    config["critic"]["lr"] = 1e-3
    other = write_run(tmp_path / "b", **{"config.json": json.dumps(config), "results.json": None})
    text = write_page([run_folder, other], tmp_path / "two.html").read_text()
    row = r'<th scope="row">critic.lr</th><td>0.00025</td><td>0.001</td>'
    assert row in text
    assert text.count("critic.clip") == 0
    # Equal names: the folders tell them apart.
    assert re.findall(r"<h1 [^>]*>(.*?)</h1>", text) == ["2 runs beside each other", "a", "b"]
    assert len(set(Elements(text).values("id"))) == len(Elements(text).values("id"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"metrics.jsonl": None}, "{0} holds no metrics.jsonl; give the --workdir of a run"),
        ({"results.json": "{"},
         "{0}/results.json is damaged; delete it to make the page without it"),
        ({"trajectories.jsonl": "{}\n{}\n"},
         "{0}/trajectories.jsonl, line 1 is no line of trajectories; delete that line"),
        ({"responses.jsonl": lines([responses(0) | {"tokens": [1]}])},
         "{0}/responses.jsonl, line 1 is damaged; delete that line"),
        ({"trajectories.jsonl": lines([trajectory(0, True), trajectory(1, True, pieces=()) |
                                       {"prompt_pieces": None}])},
         "{0}/trajectories.jsonl, line 2 is damaged; delete that line"),
    ],
)  # fmt: skip
def test_bad_folders_are_one_line(tmp_path, changed, message):
    folder = write_run(tmp_path, **changed)
    with pytest.raises(RunError) as error:
        write_page([folder])
    assert str(error.value) == message.format(folder)
    assert not (folder / "report.html").exists()


def test_bad_arguments_are_one_line(tmp_path, run_folder):
    with pytest.raises(PageError, match=r"no folder '.*nowhere'; give the --workdir of a run"):
        write_page([tmp_path / "nowhere"])
    with pytest.raises(PageError, match=r"--out is required for 2 runs, say --out=compared\.html"):
        write_page([run_folder, run_folder])


@pytest.mark.parametrize("out", ["absent/x.html", "folder"])
def test_what_cant_be_written_leaves_nothing(tmp_path, out):
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(PageError, match=r"can't write --out .*: (No such file|Is a directory)"):
        write_page([tmp_path], tmp_path / out)
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "folder"}


def test_the_viewer_holds_responses_from_all_of_the_run():
    # A wrong and a right one of each tick, as runs keep them.
    some = [{"tick": n // 2, "tokens": [0] * 4, "prompt_pieces": ["x"]} for n in range(20)]
    assert within(some, 100) == some
    assert [line["tick"] for line in within(some, 40)] == [0, 0, 3, 3, 6, 6, 9, 9]
    assert [line["tick"] for line in within(some, 6)] == [0]
    assert [line["tick"] for line in within(some, 1)] == [0]
    assert within([], 1) == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "an argument is required: the folder of a run, say runs/tiny"),
        (["x", "--outt=y"], 2, "no flag --outt; did you mean --out?"),
        (["nowhere", "--out=y"], 1, "no folder 'nowhere'; give the --workdir of a run"),
    ],
)
def test_the_apps_refusals(tmp_path, arguments, code, message):
    app = [sys.executable, ROOT / "launch" / "report.py", *arguments]
    done = subprocess.run(app, capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == f"error: {message}\n"
    assert not list(tmp_path.iterdir())


def test_the_app_prints_where_the_page_is(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    app = [sys.executable, ROOT / "launch" / "report.py", ".", "--out=new.html"]
    done = subprocess.run(app, capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "new.html\n", "")
    assert (tmp_path / "new.html").read_text().startswith("<!doctype html>")
