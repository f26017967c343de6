"""Checksums of parts: of each as zlib says, and only of parts that the table knows."""

import zlib

import jax
import numpy as np
import pytest

from s3ac_jax.io import checksums

X = np.arange(32, dtype=np.float32).reshape(8, 4)


def laid_out(x, spec):
    return jax.device_put(x, jax.NamedSharding(jax.make_mesh((4,), ("data",)), spec))


@pytest.mark.parametrize("spec", [jax.P(), jax.P("data"), jax.P(None, "data")])
def test_an_array_that_this_host_has_whole(spec):
    assert checksums.crc(laid_out(X, spec)) == zlib.crc32(X.tobytes())
    assert checksums.crc(X) == zlib.crc32(X.tobytes())
    assert checksums.parts({"x": laid_out(X, spec)}) == {}


def test_parts_are_compared_with_those_of_the_table():
    table = {f"{n}:{n + 2},0:": zlib.crc32(X[n : n + 2].tobytes()) for n in range(0, 8, 2)}
    assert checksums.same_parts(laid_out(X, jax.P("data")), table)
    flipped = X.copy()
    flipped.view(np.uint32)[5, 1] ^= 1
    assert not checksums.same_parts(laid_out(flipped, jax.P("data")), table)
    # Cut in another way there is no part that the table could tell anything of.
    assert checksums.same_parts(laid_out(flipped, jax.P(None, "data")), table)
    assert checksums.same_parts(flipped, table)
