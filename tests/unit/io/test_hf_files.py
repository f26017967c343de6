"""Folders of safetensors: what the library wrote is read, what we write the library reads."""

import json
import struct
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import safetensors

from s3ac_jax.io import hf_files
from s3ac_jax.io.hf_config import HfError
from s3ac_jax.io.hf_files import Folder, Planned, planned, write_model
from tests.unit.io.hf_folders import same_tensors, tensors_of, write_folder

TENSORS = {
    "a": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "b": np.arange(5).astype(ml_dtypes.bfloat16),
    "c": np.arange(6, dtype=np.float16).reshape(3, 2),
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.array(2.5, np.float32),
}


@pytest.mark.parametrize("shards", [1, 3])
def test_reads_what_the_library_wrote(tmp_path, shards):
    folder = Folder(write_folder(tmp_path / "m", {"a": 1}, TENSORS, shards=shards))
    assert folder.config == {"a": 1}
    same_tensors({name: folder.read(name) for name in folder.entries}, TENSORS)
    np.testing.assert_array_equal(
        folder.read("a", ((0, 2), (1, 2), (1, 3))), TENSORS["a"][:, 1:2, 1:3]
    )
    assert folder.raw("b").tobytes() == TENSORS["b"].tobytes()
    folder.read("a")[:] = 7  # a copy, and not of the file
    np.testing.assert_array_equal(folder.read("a"), TENSORS["a"])


def plan(tensors):
    return [
        planned(name, hf_files.dtype_name(x.dtype), x.shape, lambda x=x: x)
        for name, x in tensors.items()
    ]


@pytest.mark.parametrize(("limit", "shards"), [(10**9, 1), (20, 3), (1, 5)])
def test_the_library_reads_what_we_write(tmp_path, limit, shards):
    steps = []
    write_model(
        tmp_path, plan(TENSORS), max_shard_bytes=limit,
        progress=lambda done, total: steps.append((done, total)),
    )  # fmt: skip
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    same_tensors(tensors_of(tmp_path), TENSORS)
    total = sum(x.nbytes for x in TENSORS.values())
    assert steps[-1] == (total, total)
    with safetensors.safe_open(tmp_path / files[0], "numpy") as file:
        assert file.metadata() == {"format": "pt"}  # transformers asks for it
    if shards == 1:
        assert files == ["model.safetensors"]
        assert not (tmp_path / "model.safetensors.index.json").exists()
        return
    assert files == [f"model-{n:05}-of-{shards:05}.safetensors" for n in range(1, shards + 1)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": total}
    assert index["weight_map"].keys() == TENSORS.keys()
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / file, "numpy") as opened:
            assert name in opened.keys()  # noqa: SIM118, the file is no mapping


def test_tensors_of_any_dtype_are_carried_along(tmp_path):
    source = {"ids": np.arange(3), "bytes": np.arange(4, dtype=np.uint8), "w": TENSORS["b"]}
    folder = Folder(write_folder(tmp_path / "m", {}, source))
    carried = [
        Planned(name, e.dtype, e.shape, e.num_bytes, lambda name=name: folder.raw(name))
        for name, e in folder.entries.items()
    ]
    (tmp_path / "out").mkdir()
    write_model(tmp_path / "out", carried, max_shard_bytes=10**9)
    same_tensors(tensors_of(tmp_path / "out"), source)
    with pytest.raises(HfError, match=r"model.safetensors: ids has dtype I64, only F32, F16, BF16"):
        folder.read("ids")


def test_tensors_are_made_one_at_a_time_in_their_turn(tmp_path):
    alive, most = [], []

    def make(n):
        alive.append(n)
        most.append(len(alive))
        values = np.full(4, n, np.float32)
        alive.remove(n)
        return values

    wanted = [planned(f"t{n}", "F32", (4,), lambda n=n: make(n)) for n in range(5)]
    write_model(tmp_path, wanted, max_shard_bytes=40)
    assert most == [1] * 5
    np.testing.assert_array_equal(tensors_of(tmp_path)["t3"], np.full(4, 3, np.float32))


def test_a_failure_leaves_no_half_a_file_and_no_index(tmp_path):
    def broken():
        raise MemoryError

    wanted = [*plan({"a": TENSORS["a"]}), planned("z", "F32", (4,), broken)]
    with pytest.raises(MemoryError):
        write_model(tmp_path, wanted, max_shard_bytes=1)
    assert [p.name for p in tmp_path.iterdir()] == ["model-00001-of-00002.safetensors"]


def test_a_full_disk_is_one_line(tmp_path):
    code = """
import pathlib, resource, signal, sys
import numpy as np
from s3ac_jax.io.hf_config import HfError
from s3ac_jax.io.hf_files import planned, write_model
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
wanted = [planned("a", "F32", (1000,), lambda: np.zeros(1000, np.float32))]
try:
    write_model(pathlib.Path(sys.argv[1]), wanted, max_shard_bytes=10**9)
except HfError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"can't write {tmp_path / 'model.safetensors'}: File too large\n"
    assert list(tmp_path.iterdir()) == []


def header(names):
    text = json.dumps(
        {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in names}
    ).encode()
    return struct.pack("<Q", len(text)) + text + b"\0\0\0\0"


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


def rewrite(name, content):
    def change(folder):
        (folder / name).write_bytes(content)

    return change


def without(name):
    return lambda folder: (folder / name).unlink()


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("shards", "change", "line"),
    [
        (1, cut, r"model.safetensors is no whole safetensors file \(.*\); fetch or save it again"),
        (1, rewrite("model.safetensors", b""), "model.safetensors is no whole safetensors file"),
        (1, rewrite("model.safetensors", b"version https://git-lfs"), "is no whole safetensors"),
        (1, rewrite("model.safetensors", header(["a", "a2"])), "is no whole safetensors file"),
        (1, without("config.json"), "has no config.json, so it is no Hugging Face model"),
        (1, rewrite("config.json", b"{"), "config.json is no JSON: "),
        (1, rewrite("config.json", b"[]"), "config.json holds no JSON object"),
        (1, rewrite("config.json", b"\xff"), "config.json can't be read"),
        (1, without("model.safetensors"), f"has neither model.safetensors nor {INDEX}"),
        (2, without("model-00002-of-00002.safetensors"),
         f"{INDEX} names model-00002-of-00002.safetensors, which isn't there"),
        (2, rewrite(INDEX, b"{}"), f"{INDEX} has no weight_map"),
        (2, rewrite(INDEX, b'{"weight_map": {"a": 3}}'), f"{INDEX} has no weight_map"),
        (2, rewrite(INDEX, b'{"weight_map": {"a": "../x.safetensors"}}'), "which isn't there"),
        (2, rewrite(INDEX, b'{"weight_map": {"zz": "model-00001-of-00002.safetensors"}}'),
         "says that zz is in model-00001-of-00002.safetensors, but it isn't"),
        (2, lambda f: (f / "model-00002-of-00002.safetensors").write_bytes(
            (f / "model-00001-of-00002.safetensors").read_bytes()),
         "is in both model-00001-of-00002.safetensors and model-00002-of-00002.safetensors"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_folder_is_one_line(tmp_path, shards, change, line):
    change(write_folder(tmp_path / "m", {}, TENSORS, shards=shards))
    with pytest.raises(HfError, match=line) as caught:
        Folder(tmp_path / "m")
    assert "\n" not in str(caught.value)


def test_other_formats_and_other_places(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(HfError, match=r"pytorch_model.bin is of a format that isn't read here"):
        Folder(tmp_path)
    for place in (tmp_path / "absent", tmp_path / "config.json"):
        with pytest.raises(HfError, match=r"no folder .*; give one with config.json"):
            Folder(place)


def test_where_a_model_can_be_saved(tmp_path):
    assert hf_files.new_folder(tmp_path / "a" / "b") == (tmp_path / "a" / "b", True)
    assert hf_files.new_folder(tmp_path / "a" / "b") == (tmp_path / "a" / "b", False)
    with pytest.raises(HfError, match="a isn't empty; name a new folder, or delete it first"):
        hf_files.new_folder(tmp_path / "a")
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(HfError, match="is or lies below a file"):
            hf_files.new_folder(place)
    with pytest.raises(HfError, match="can't make /proc/model: "):
        hf_files.new_folder("/proc/model")


def test_dtypes_that_are_not_written():
    with pytest.raises(HfError, match="int64 weights can't be saved"):
        hf_files.dtype_name(np.int64)


def test_config_comes_back_to_the_byte(tmp_path):
    write_folder(tmp_path / "m", {}, TENSORS)
    text = '{"a":\r\n "\u00e9"}\n'
    (tmp_path / "m" / "config.json").write_bytes(text.encode())
    hf_files.write_text(tmp_path / "copy", Folder(tmp_path / "m").config_text)
    assert (tmp_path / "copy").read_bytes() == text.encode()
    assert {path.name for path in tmp_path.iterdir()} == {"m", "copy"}
