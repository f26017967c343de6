"""Weight files: what goes in comes out, and damage is one line."""

import json
import struct

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from s3ac_jax.io.weights import WeightsError, load_weights, save_weights

PARAMS = {
    "embed": np.arange(6, dtype=np.float16).reshape(2, 3),
    "layers": {
        "mlp": {"up": jnp.array([1.5, -2.25], jnp.bfloat16)},
        "norm": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    },
}


def test_round_trip(tmp_path):
    path = tmp_path / "w.safetensors"
    save_weights(path, PARAMS, {"spec": '{"layers": 2}', "step": "7"})
    params, metadata = load_weights(path)
    assert metadata == {"spec": '{"layers": 2}', "step": "7"}
    assert params["layers"]["mlp"]["up"].dtype == ml_dtypes.bfloat16
    assert params["embed"].dtype == np.float16
    np.testing.assert_array_equal(params["layers"]["mlp"]["up"], PARAMS["layers"]["mlp"]["up"])
    np.testing.assert_array_equal(params["layers"]["norm"], PARAMS["layers"]["norm"])
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]


def test_the_header_is_the_public_format(tmp_path):
    save_weights(tmp_path / "w", PARAMS, {})
    raw = (tmp_path / "w").read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    assert header["layers/mlp/up"]["dtype"] == "BF16"
    assert header["layers/norm"]["shape"] == [3, 2]


def test_bad_files_are_one_line(tmp_path):
    path = tmp_path / "w"
    with pytest.raises(WeightsError, match="no weights at"):
        load_weights(path)
    save_weights(path, PARAMS, {})
    whole = path.read_bytes()
    for content in (whole[:-5], whole[:20], b"", b"no safetensors file at all"):
        path.write_bytes(content)
        with pytest.raises(WeightsError, match="is no whole safetensors file") as caught:
            load_weights(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("params", "metadata", "line"),
    [
        ({"a": np.arange(3)}, {}, "a: int64 weights can't be saved"),
        ({"a": {"b/c": np.zeros(2)}}, {}, "words without '/'"),
        ({"a": np.zeros(2, np.float32)}, {"step": 3}, "metadata 'step' must be text"),
    ],
)
def test_what_cannot_be_saved(tmp_path, params, metadata, line):
    with pytest.raises(WeightsError, match=line):
        save_weights(tmp_path / "w", params, metadata)
    assert not list(tmp_path.iterdir())


def test_a_path_that_cannot_be_written(tmp_path):
    with pytest.raises(WeightsError, match="can't write weights"):
        save_weights(tmp_path / "absent" / "w", PARAMS, {})
