"""Weights as a stream: bytes known by hand, and every fault named."""

import json
import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from s3ac_jax.rollout.weights_wire import (
    Leaf,
    Manifest,
    Receiver,
    WeightsWireError,
    chunks,
    make_manifest,
    read_manifest,
)

# In the order in which jax flattens dicts: by key.
TREE = {
    "digits": np.frombuffer(b"123456789", np.uint8),
    "layers": {
        "empty": np.zeros((0, 3), np.float32),
        "half": jnp.array([1.0, -2.0], jnp.bfloat16),
        "up": np.array([[1, 2, 3], [4, 5, 6]], np.float32).T,  # not in row-major order
    },
    "scale": np.float32(0.5).reshape(()),
}
DATA = (
    b"123456789"
    + struct.pack("<HH", 0x3F80, 0xC000)
    + struct.pack("<6f", 1, 4, 2, 5, 3, 6)
    + struct.pack("<f", 0.5)
)
ABSTRACT = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), TREE)


def manifest():
    return make_manifest(TREE, 7, "abad1dea", False)


def received(manifest, data, abstract=ABSTRACT, size=5):
    receiver = Receiver(manifest, abstract)
    for start in range(0, len(data), size):
        receiver.feed(data[start : start + size])
    return receiver.finish()


def test_the_manifest_says_what_comes():
    made = manifest()
    assert (made.version, made.fingerprint, made.in_flight) == (7, "abad1dea", False)
    assert [leaf[:4] for leaf in made.leaves] == [
        ("digits", (9,), "uint8", 9),
        ("layers/empty", (0, 3), "float32", 0),
        ("layers/half", (2,), "bfloat16", 4),
        ("layers/up", (3, 2), "float32", 24),
        ("scale", (), "float32", 4),
    ]
    assert made.leaves[0].crc32 == 0xCBF43926  # the check value of CRC-32
    assert made.leaves[1].crc32 == 0


def test_the_manifest_travels_as_json():
    made = manifest()
    found = json.loads(made.to_json())
    assert set(found) == {"version", "fingerprint", "in_flight", "leaves"}
    assert found["leaves"][0] == {
        "path": "digits", "shape": [9], "dtype": "uint8", "bytes": 9, "crc32": 0xCBF43926,
    }  # fmt: skip
    assert read_manifest(made.to_json()) == made


@pytest.mark.parametrize("size", [1, 4, 13, 41, 1000])
def test_the_data_is_that_of_the_leaves_end_to_end(size):
    sent = list(chunks(TREE, manifest(), size))
    assert b"".join(sent) == DATA
    assert {len(chunk) for chunk in sent[:-1]} <= {size}
    assert 0 < len(sent[-1]) <= size


@pytest.mark.parametrize("size", [1, 7, 41])
def test_what_arrives_is_what_was_sent(size):
    tree = received(read_manifest(manifest().to_json()), DATA, size=size)
    assert jax.tree.structure(tree) == jax.tree.structure(TREE)
    assert tree["layers"]["half"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(tree["layers"]["up"], [[1, 4], [2, 5], [3, 6]])
    np.testing.assert_array_equal(tree["layers"]["half"].astype(float), [1, -2])
    assert tree["layers"]["empty"].shape == (0, 3)
    assert tree["scale"].shape == ()
    assert tree["scale"] == 0.5
    assert tree["digits"].tobytes() == b"123456789"


def test_sharded_weights_travel_whole():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    whole = np.arange(48, dtype=np.float32).reshape(4, 12)
    leaf = jax.device_put(whole, NamedSharding(mesh, PartitionSpec("x", "y")))
    made = make_manifest({"w": leaf}, 1, "f", False)
    assert b"".join(chunks({"w": leaf}, made)) == whole.tobytes()
    assert made == make_manifest({"w": whole}, 1, "f", False)


def without(entry, key):
    return {name: value for name, value in entry.items() if name != key}


LEAF = {"path": "w", "shape": [2], "dtype": "float32", "bytes": 8, "crc32": 1}
GOOD = {"version": 1, "fingerprint": "f", "in_flight": False, "leaves": [LEAF]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"\xff\xfe\x00", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"9" * 10_000, "no JSON"),
        (b"[1]", "no JSON object"),
        (b"null", "no JSON object"),
        *[(without(GOOD, key), key) for key in GOOD],
        *[(GOOD | {"version": version}, "version") for version in (-1, 1 << 31, 1.0, True, "1")],
        (GOOD | {"version": float("nan")}, "version"),
        (GOOD | {"fingerprint": 5}, "fingerprint"),
        (GOOD | {"fingerprint": ""}, "fingerprint"),
        (GOOD | {"in_flight": 1}, "in_flight"),
        (GOOD | {"leaves": {"w": LEAF}}, "leaves"),
        (GOOD | {"leaves": [LEAF, "w"]}, "leaf 1"),
        (GOOD | {"leaves": [LEAF, LEAF]}, "'w' stands twice"),
        *[(GOOD | {"leaves": [without(LEAF, key)]}, key) for key in LEAF],
        *[(GOOD | {"leaves": [LEAF | {"path": path}]}, "path") for path in ("", 3, None)],
        *[
            (GOOD | {"leaves": [LEAF | {"shape": shape}]}, "'w'.*shape")
            for shape in (2, [-1], [2.0], ["2"], [True], [[2]])
        ],
        (GOOD | {"leaves": [LEAF | {"dtype": 32}]}, "'w'.*dtype"),
        *[
            (GOOD | {"leaves": [LEAF | {"bytes": size}]}, "'w'.*bytes")
            for size in (-8, 1 << 63, 8.0, True)
        ],
        *[(GOOD | {"leaves": [LEAF | {"crc32": crc}]}, "'w'.*crc32") for crc in (-1, 1 << 32, "1")],
    ],
)
def test_a_malformed_manifest_is_named(data, message):
    data = data if isinstance(data, bytes) else json.dumps(data).encode()
    with pytest.raises(WeightsWireError, match=message) as caught:
        read_manifest(data)
    assert "\n" not in str(caught.value)


def test_the_good_manifest_of_these_tests_is_good():
    assert read_manifest(json.dumps(GOOD).encode()) == Manifest(
        1, "f", False, (Leaf("w", (2,), "float32", 8, 1),)
    )


WANT = {"a": jax.ShapeDtypeStruct((2,), jnp.bfloat16), "b": jax.ShapeDtypeStruct((3,), jnp.float32)}


def offered(**changes):
    leaves = {"a": Leaf("a", (2,), "bfloat16", 4, 0), "b": Leaf("b", (3,), "float32", 12, 0)}
    leaves = {name: leaf for name, leaf in (leaves | changes).items() if leaf}
    return Manifest(1, "f", False, tuple(leaves.values()))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (offered(b=None), "^b is missing"),
        (offered(c=Leaf("c", (), "float32", 4, 0)), "'c' is unknown"),
        (offered(b=Leaf("b", (3, 1), "float32", 12, 0)), r"^b has shape \[3, 1\], .* \[3\]"),
        (offered(b=Leaf("b", (3 << 60,), "float32", 3 << 62, 0)), "^b has shape"),
        (offered(a=Leaf("a", (2,), "float32", 8, 0)), "^a is float32, the model needs bfloat16"),
        (offered(a=Leaf("a", (2,), "no such", 4, 0)), "^a is no such, the model needs bfloat16"),
        (offered(b=Leaf("b", (3,), "float32", 16, 0)), "^b is announced with 16 bytes.*take 12"),
    ],
)
def test_what_the_model_does_not_need_is_refused_before_any_data(found, message):
    with pytest.raises(WeightsWireError, match=message):
        Receiver(found, WANT)


def test_a_changed_bit_is_found_in_its_leaf():
    for place, name in ((0, "digits"), (8, "digits"), (9, "half"), (20, "up"), (40, "scale")):
        data = bytearray(DATA)
        data[place] ^= 4
        with pytest.raises(WeightsWireError, match=f"{name} did not arrive as it was sent"):
            received(manifest(), bytes(data))


def test_a_wrong_checksum_of_an_empty_leaf_is_found():
    with pytest.raises(WeightsWireError, match="e did not arrive"):
        Receiver(
            Manifest(1, "f", False, (Leaf("e", (0,), "float32", 0, 5),)),
            {"e": jax.ShapeDtypeStruct((0,), jnp.float32)},
        )


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (0, "in digits: 9 bytes of it and 4 whole"),
        (12, "in layers/half: 1 bytes of it and 2 whole"),
        (40, "in scale: 1 bytes of it and 0 whole"),
    ],
)
def test_a_short_stream_is_found(end, message):
    with pytest.raises(WeightsWireError, match=f"ended {message}"):
        received(manifest(), DATA[:end])


def test_surplus_bytes_are_found():
    with pytest.raises(WeightsWireError, match="3 bytes more"):
        received(manifest(), DATA + b"abc", size=44)


def test_swapped_leaves_are_found():
    tree = {"a": np.arange(4, dtype=np.int32), "b": np.arange(4, 8, dtype=np.int32)}
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
    made = make_manifest(tree, 1, "f", True)
    data = tree["b"].tobytes() + tree["a"].tobytes()
    with pytest.raises(WeightsWireError, match=r"^a did not arrive"):
        received(made, data, abstract)
