"""Rows put into shared-out rows, against numpy."""

import jax
import numpy as np
import pytest

from s3ac_jax.parallel.mesh import MeshSpec, make_mesh
from s3ac_jax.parallel.slots import put_rows

MESHES = (MeshSpec(), MeshSpec(data=2, tensor=2), MeshSpec(data=2, expert=2), MeshSpec(data=4))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("stacked", [False, True])
def test_put_rows(mesh, stacked):
    rng = np.random.default_rng(0)
    lead = (3,) if stacked else ()
    old = rng.normal(size=(*lead, 8, 2, 6, 5)).astype(np.float32)
    new = rng.normal(size=(*lead, 4, 2, 3, 5)).astype(np.float32)  # half as many positions
    rows, slots = np.array([2, 0, 2, 1, 3]), np.array([7, 1, 4, 8, 3])  # 8 is out of range
    want = old.copy()
    for row, slot in zip(rows, slots, strict=True):
        if slot < 8:
            want[..., slot, :, :3, :] = new[..., row, :, :, :]
    axes = (None,) * stacked + ("rows", "kv_heads", None, None)
    with jax.set_mesh(make_mesh(mesh)):
        got = jax.jit(lambda *args: put_rows(*args, axes))(old, new, rows, slots)
    np.testing.assert_array_equal(got, want)
