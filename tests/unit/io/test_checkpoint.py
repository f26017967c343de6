"""Checkpoints: round trip, kills, damage, full disks. The disk and the kernel are real."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from s3ac_jax.core.types import DataCursor, Learner, PromptStats, RunState
from s3ac_jax.io.checkpoint import CheckpointError, Checkpoints

ROOT = pathlib.Path(__file__).parents[3]


def _run_state(width: int = 4) -> RunState:
    params = {
        "layers": {"mlp": {"up": jnp.arange(2.0 * width).reshape(2, width)}},
        "embed": jnp.array([[1.5, -2.0]], jnp.bfloat16),
    }
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-3), optax.masked(optax.sgd(0.1), False)
    )
    learner = Learner(params, {"none": None, "nothing": {}}, tx.init(params), jnp.int32(3))
    stats = PromptStats(jnp.ones(3), jnp.zeros(3), np.arange(3, dtype=np.int32), None)
    cursor = DataCursor(jnp.int32(0), jnp.int32(7))
    band = jnp.full(2, jnp.nan)
    return RunState(learner, learner, stats, cursor, entropy_band=band, tick=jnp.int32(9))


@pytest.fixture
def saved(tmp_path):
    """A folder with steps 1 and 2 of one array each, "w", filled with the step."""
    checkpoints = Checkpoints(tmp_path / "ck")
    for step in (1, 2):
        checkpoints.save(step, {"w": jnp.full((300, 100), step, jnp.float32)}, {"step": step})
    yield checkpoints, tmp_path / "ck"
    checkpoints.close()


LIKE = {"w": jax.ShapeDtypeStruct((300, 100), jnp.float32)}


def test_round_trip_keeps_structure_types_bits_and_note(tmp_path):
    state = _run_state()
    writer, reader = Checkpoints(tmp_path / "ck"), Checkpoints(tmp_path / "ck")
    writer.save(9, state, {"tick": 9, "deep": {"list": [1, 2.5, None]}})
    restored, note = reader.restore(9, state)
    assert note == {"tick": 9, "deep": {"list": [1, 2.5, None]}}
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for new, old in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert isinstance(new, type(old))
        assert new.dtype == old.dtype
        assert np.asarray(new).tobytes() == np.asarray(old).tobytes()
    writer.close()
    reader.close()


def test_shapes_alone_and_shardings_are_enough_to_restore(tmp_path):
    mesh = jax.make_mesh((1,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    state = {"w": jnp.arange(8.0), "empty": jnp.zeros((0, 3)), "key": np.uint32([1, 2])}
    checkpoints = Checkpoints(tmp_path / "ck")
    checkpoints.save(0, state, {})
    like = {
        "w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding),
        "empty": jax.ShapeDtypeStruct((0, 3), jnp.float32),
        "key": jax.ShapeDtypeStruct((2,), jnp.uint32),
    }
    restored, _ = checkpoints.restore(0, like)
    assert restored["w"].sharding == sharding
    assert restored["w"].committed
    assert not restored["key"].committed
    assert restored["empty"].shape == (0, 3)
    np.testing.assert_array_equal(restored["w"], np.arange(8.0))
    checkpoints.close()


def test_a_restored_state_can_be_donated(saved):
    checkpoints, _ = saved
    state, _ = checkpoints.restore(2, LIKE)
    after = jax.jit(lambda s: {"w": s["w"] + 1}, donate_argnums=0)(state)
    np.testing.assert_array_equal(after["w"], 3.0)
    assert checkpoints.restore(2, LIKE)[0]["w"][0, 0] == 2.0


def test_a_reader_creates_and_deletes_nothing(tmp_path):
    folder = tmp_path / "ck"
    assert Checkpoints(folder).latest() is None
    with pytest.raises(CheckpointError, match="has no checkpoint of step 3"):
        Checkpoints(folder).restore(3, LIKE)
    assert not folder.exists()


def test_only_the_newest_are_kept_and_steps_may_go_back(saved):
    checkpoints, folder = saved
    checkpoints.save(5, {"w": jnp.zeros(2)}, {})
    assert checkpoints.steps() == [2, 5]
    with pytest.raises(CheckpointError, match="5 exists already"):
        checkpoints.save(5, {"w": jnp.zeros(2)}, {})
    checkpoints.save(4, {"w": jnp.zeros(2)}, {})
    assert 4 in checkpoints.steps()
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == ["4", "5"]


@pytest.mark.parametrize(
    ("like", "line"),
    [
        (
            _run_state(width=6),
            "actor/trainable/layers/mlp/up: checkpoint has (2, 4) float32, this run needs "
            "(2, 6) float32 (and 5 more)",
        ),
        (
            {"actor": jnp.zeros(2)},
            "actor: missing in the checkpoint, this run needs (2,) float32 (and",
        ),
    ],
)
def test_another_config_is_one_line_that_names_the_piece(tmp_path, like, line):
    checkpoints = Checkpoints(tmp_path / "ck")
    checkpoints.save(1, _run_state(), {})
    with pytest.raises(CheckpointError) as caught:
        checkpoints.restore(1, like)
    assert str(caught.value).startswith(line)
    assert "use another --workdir or the config it was made with" in str(caught.value)
    assert "\n" not in str(caught.value)
    checkpoints.close()


@pytest.mark.parametrize(
    ("like", "line"),
    [
        ({"w": jnp.zeros((300, 100), jnp.bfloat16)}, "w: .*float32, this run needs .*bfloat16"),
        ({}, r"w: checkpoint has \(300, 100\) float32, this run has no such piece"),
        ({**LIKE, "v": jnp.int32(0)}, r"v: missing in the checkpoint, this run needs \(\) int32"),
    ],
)
def test_wrong_dtype_surplus_and_missing_pieces(saved, like, line):
    with pytest.raises(CheckpointError, match=line):
        saved[0].restore(2, like)


@pytest.mark.parametrize(
    ("state", "note", "line"),
    [
        ({"a": {"n": 3}}, {}, "a/n: a checkpoint holds arrays, not int"),
        ({"k": jax.random.key(0)}, {}, "k: a typed key"),
        ({"w": jnp.zeros(2)}, {"f": object()}, "the note of a checkpoint must be JSON"),
    ],
)
def test_what_cannot_be_saved_is_said_before_anything_is_written(tmp_path, state, note, line):
    with pytest.raises(CheckpointError, match=line):
        Checkpoints(tmp_path / "ck").save(0, state, note)
    assert not (tmp_path / "ck").exists()


def _damage(path: pathlib.Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "delete":
        path.unlink()
    elif how == "truncate":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)


@pytest.mark.parametrize("how", ["delete", "truncate", "flip"])
def test_damage_to_any_file_is_told_and_nothing_older_is_chosen(saved, how, capfd):
    checkpoints, folder = saved
    files = [p for p in sorted((folder / "2").rglob("*")) if p.is_file() and p.stat().st_size]
    # Without its marker or its table a step counts as unfinished, or is checked less.
    files = [p for p in files if p.name not in ("commit_success.txt", "files.json")]
    assert len(files) > 5
    for file in files:
        before = file.read_bytes()
        _damage(file, how)
        assert checkpoints.latest() == 2
        with pytest.raises(CheckpointError) as caught:
            checkpoints.restore(2, LIKE)
        line = str(caught.value)
        assert line.startswith(f"{folder / '2'} is damaged (")
        assert line.endswith("deleting that folder falls back to step 1")
        assert "\n" not in line
        file.write_bytes(before)
    assert checkpoints.restore(2, LIKE)[0]["w"][0, 0] == 2.0
    assert capfd.readouterr().err == ""


def test_following_the_advice_falls_back(saved):
    checkpoints, folder = saved
    shutil.rmtree(folder / "2")
    assert checkpoints.latest() == 1
    state, note = checkpoints.restore(1, LIKE)
    assert (state["w"][0, 0], note) == (1.0, {"step": 1})
    _damage(folder / "1" / "note" / "metadata", "flip")
    with pytest.raises(CheckpointError, match="no older one is left"):
        checkpoints.restore(1, LIKE)


def test_flipped_bytes_of_an_array_are_found_without_the_file_table(tmp_path):
    values = np.random.default_rng(0).normal(size=(500, 500)).astype(np.float32)
    checkpoints = Checkpoints(tmp_path / "ck")
    checkpoints.save(1, {"actor": {"w": values}}, {})
    (tmp_path / "ck" / "1" / "files.json").unlink()
    data = max((tmp_path / "ck").rglob("*"), key=lambda p: p.stat().st_size)
    _damage(data, "flip")
    with pytest.raises(CheckpointError, match=r"ck/1 is damaged \(actor/w has changed"):
        checkpoints.restore(1, {"actor": {"w": values}})
    checkpoints.close()


def test_a_note_altered_to_other_valid_json_is_found_without_the_file_table(saved):
    checkpoints, folder = saved
    (folder / "2" / "files.json").unlink()
    path = folder / "2" / "note" / "metadata"
    record = json.loads(path.read_text())
    record["note"]["step"] = 1
    path.write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="note has changed"):
        checkpoints.restore(2, LIKE)


def test_planted_half_written_folders_are_never_chosen(saved):
    checkpoints, folder = saved
    (folder / "7" / "state" / "d").mkdir(parents=True)
    (folder / "7" / "state" / "manifest.ocdbt").write_bytes(b"half")
    (folder / "8.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    assert checkpoints.latest() == 2
    reopened = Checkpoints(folder)
    assert reopened.latest() == 2
    reopened.save(7, {"w": jnp.zeros(2)}, {})
    assert reopened.steps() == [2, 7]
    assert not (folder / "8.orbax-checkpoint-tmp").exists()
    reopened.close()


SAVE_FOREVER = """
import sys
import numpy as np
from s3ac_jax.io.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1])
step = (checkpoints.latest() or 0) + 1
while True:
    arrays = {f"w{n}": np.full((200, 1000), step, np.float32) for n in range(10)}
    checkpoints.save(step, arrays, {"step": step})
    step += 1
"""


def test_kill_in_the_middle_of_a_save(tmp_path):
    folder = tmp_path / "ck"
    like = {f"w{n}": np.zeros((200, 1000), np.float32) for n in range(10)}
    found, halves, before = [], 0, 0
    for delay in (0.0, 0.02, 0.05):
        child = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", SAVE_FOREVER, str(folder)], cwd=ROOT
        )
        _wait_for(lambda seen=before: (Checkpoints(folder).latest() or 0) > seen, child)
        _wait_for(lambda: any(folder.glob("*-tmp")), child)
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        child.wait()
        halves += any(folder.glob("*-tmp"))
        checkpoints = Checkpoints(folder)
        before = checkpoints.latest()
        state, note = checkpoints.restore(before, like)
        assert note == {"step": before}
        assert all((w == before).all() for w in state.values())
        found.append(before)
        checkpoints.close()
    assert halves > 0, "no kill met a save in progress"
    assert found == sorted(set(found))


def _wait_for(condition, child, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert child.poll() is None, "the saving process ended"
        assert time.monotonic() < end, "timeout"
        time.sleep(0.001)


SAVE_UNDER_A_LIMIT = """
import resource, sys
import numpy as np
from s3ac_jax.io.checkpoint import CheckpointError, Checkpoints
checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(1, {"w": np.ones(4, np.float32)}, {})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
noise = np.random.default_rng(0).normal(size=(500, 500)).astype(np.float32)
try:
    checkpoints.save(2, {"w": noise}, {})
except CheckpointError as error:
    print(error)
assert checkpoints.latest() == 1
assert checkpoints.restore(1, {"w": np.zeros(4, np.float32)})[0]["w"].sum() == 4
checkpoints.save(3, {"w": np.ones(4, np.float32)}, {})
print(checkpoints.steps())
"""


def test_the_kernel_refuses_to_write_more(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SAVE_UNDER_A_LIMIT, str(tmp_path / "ck")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    line, steps = done.stdout.splitlines()
    assert line.startswith(f"can't save {tmp_path / 'ck' / '2'}: the disk is full; free some")
    assert steps == "[1, 3]"


@contextlib.contextmanager
def _small_disk(folder: pathlib.Path):
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "s3ac-test", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk(tmp_path, capfd):
    with _small_disk(tmp_path / "disk"):
        checkpoints = Checkpoints(tmp_path / "disk" / "ck")
        small = {"w": jnp.ones(4)}
        noise = {"w": np.random.default_rng(0).normal(size=(500, 500))}
        checkpoints.save(1, small, {})
        with pytest.raises(CheckpointError, match=r"ck/2: the disk is full.*\(step 1 is intact\)"):
            checkpoints.save(2, noise, {})
        assert checkpoints.latest() == 1
        assert checkpoints.restore(1, small)[0]["w"].sum() == 4
        checkpoints.save(3, small, {})
        assert checkpoints.steps() == [1, 3]
        checkpoints.close()
    assert capfd.readouterr() == ("", "")


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"can't save .*file/ck/1: .*\(nothing was saved"):
        Checkpoints(tmp_path / "file" / "ck").save(1, {"w": jnp.ones(2)}, {})


RESHARD = """
import sys
import jax, jax.numpy as jnp, numpy as np
from s3ac_jax.io.checkpoint import Checkpoints
mesh = jax.make_mesh((2, 2), ("a", "b"))
rows, columns = (jax.NamedSharding(mesh, jax.P(*spec)) for spec in (("a",), (None, "b")))
w = jax.device_put(jnp.arange(64.0).reshape(8, 8), rows)
checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(1, {"w": w}, {})
like = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=columns)}
restored = checkpoints.restore(1, like)[0]["w"]
assert restored.sharding == columns, restored.sharding
assert [s.data.shape for s in restored.addressable_shards] == [(8, 4)] * 4
np.testing.assert_array_equal(restored, np.arange(64.0).reshape(8, 8))
"""


def test_four_devices_restore_into_another_sharding(tmp_path):
    flags = "--xla_force_host_platform_device_count=4"
    subprocess.run(
        [sys.executable, "-W", "error", "-c", RESHARD, str(tmp_path / "ck")],
        cwd=ROOT, check=True, env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
