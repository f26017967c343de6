"""The weights that a running engine reads, exchanged whole between two of its steps."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from s3ac_jax.core.trees import named_leaves
from s3ac_jax.core.types import PyTree
from s3ac_jax.rollout.backend import RolloutError, fingerprint_of


class Weights(NamedTuple):
    """One set of weights. params: as the engine reads them; fingerprint: as they were given, cast.

    serial: counts exchanges, so that equal versions are told apart.
    Source: ours.
    """

    params: PyTree
    version: int
    fingerprint: str
    serial: int


class WrongFingerprint(RolloutError):
    """Weights arrived that are not those that were sent. Source: ours."""


class ParamStore:
    """Holds the weights in use.

    prepare: casts what is given to the dtypes it is read in. load: makes of that what the engine
    reads, such as `Engine.load_params`. abstract: shapes, dtypes and shardings between the two,
    which new weights have to have.
    JetStream's threads keep the object they were given as `params` for good: this one. What needs
    no change is shared with the giver, who must not donate it while it is in use.
    Source: ours.
    """

    def __init__(
        self,
        params: PyTree,
        version: int,
        *,
        prepare: Callable[[PyTree], PyTree] = lambda params: params,
        load: Callable[[PyTree], PyTree] = lambda params: params,
    ):
        self._prepare, self._load = prepare, load
        self._serials = itertools.count()
        params = jax.tree.map(jnp.asarray, prepare(params))
        self.abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
            params,
        )
        self._weights = self._made(params, version)

    def get(self) -> Weights:
        """The weights to use now. Source: ours."""
        return self._weights

    def ready(self, params: PyTree | None, version: int, fingerprint: str = "") -> Weights:
        """These weights cast, placed like the first ones, and fingerprinted; not yet in use.

        None is for those in use, under another version. fingerprint: what they must have, "" for
        whatever they have.
        Raises WrongFingerprint, or RolloutError when they are not the same leaves, of the same
        shapes and dtypes.
        Source: ours.
        """
        if params is None:
            weights = self._weights._replace(version=version)
        else:
            weights = self._made(_like(self._prepare(params), self.abstract), version)
        if fingerprint and fingerprint != weights.fingerprint:
            raise WrongFingerprint(
                f"the weights of version {version} have the fingerprint {weights.fingerprint}, "
                f"those that were sent have {fingerprint}: version {self._weights.version} stays "
                "in use"
            )
        return weights

    def set(self, weights: Weights) -> None:
        """What `get` returns from now on. Source: ours."""
        self._weights = weights

    def _made(self, params: PyTree, version: int) -> Weights:
        return Weights(self._load(params), version, fingerprint_of(params), next(self._serials))


def _like(params: PyTree, wanted: PyTree) -> PyTree:
    """The weights on the devices where they are wanted; they must match."""
    new, old = named_leaves(params), named_leaves(wanted)
    if new.keys() != old.keys():
        name = min(new.keys() ^ old.keys())
        raise RolloutError(f"{name} is {'missing' if name in old else 'unknown to the model'}")
    for name, leaf in new.items():
        got, want = ((x.shape, jnp.dtype(x.dtype).name) for x in (leaf, old[name]))
        if got != want:
            raise RolloutError(
                f"{name} is {got[1]} {list(got[0])}, the model reads {want[1]} {list(want[0])}"
            )
    return jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), params, wanted)
