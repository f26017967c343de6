"""The weights that a running engine reads, exchanged whole between two of its steps."""

import itertools
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from s3ac_jax.core.trees import named_leaves
from s3ac_jax.core.types import PyTree
from s3ac_jax.rollout.backend import RolloutError, fingerprint_of
from s3ac_jax.rollout.engine import Engine

# Versions whose fingerprints are remembered, for requests that began under them.
_REMEMBERED = 64


class StoredWeights(NamedTuple):
    """One set of weights. params: as the engine reads them; fingerprint: as they were given, cast.

    serial: counts exchanges, so that equal versions are told apart.
    Source: ours.
    """

    params: PyTree
    version: int
    fingerprint: str
    serial: int


class WrongFingerprint(RolloutError):
    """Weights that are not those that were sent, or asked for. Source: ours."""


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
        self._named: dict[int, str] = {}
        self.set(self._made(params, version))

    @classmethod
    def of(cls, engine: Engine, params: PyTree, version: int) -> "ParamStore":
        """The weights of an engine, made into what it reads. Source: ours."""
        cast = engine.network.in_compute_dtype
        return cls(params, version, prepare=cast, load=engine.load_params)

    def get(self) -> StoredWeights:
        """The weights to use now. Source: ours."""
        return self._weights

    def ready(self, params: PyTree | None, version: int, fingerprint: str = "") -> StoredWeights:
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
            params = _placed(params, self.abstract)
            weights = self._made(_like(self._prepare(params), self.abstract), version)
        if fingerprint and fingerprint != weights.fingerprint:
            raise WrongFingerprint(
                f"the weights of version {version} have the fingerprint {weights.fingerprint}, "
                f"those that were sent have {fingerprint}: version {self._weights.version} stays "
                "in use"
            )
        return weights

    def set(self, weights: StoredWeights) -> None:
        """What `get` returns from now on. Source: ours."""
        self._weights = weights
        self._named.pop(weights.version, None)
        self._named[weights.version] = weights.fingerprint
        while len(self._named) > _REMEMBERED:
            del self._named[next(iter(self._named))]

    def check(self, version: int, fingerprint: str) -> None:
        """Raises WrongFingerprint when weights with another one were the last of this version.

        Source: ours: two trainers that use one server may have the same numbers.
        """
        found = self._named.get(version, fingerprint)
        if found != fingerprint:
            raise WrongFingerprint(
                f"the weights of version {version} here have the fingerprint {found}, the request "
                f"is for {fingerprint}: does another trainer use this server?"
            )

    def _made(self, params: PyTree, version: int) -> StoredWeights:
        fingerprint = fingerprint_of(params)
        return StoredWeights(self._load(params), version, fingerprint, next(self._serials))


def _placed(params: PyTree, wanted: PyTree) -> PyTree:
    """Weights on the devices where they are wanted, each shard straight to its own.

    Before anything is computed with them: jax would put arrays of the host on one device, whole.
    """
    new, old = named_leaves(params), named_leaves(wanted)
    if new.keys() != old.keys():
        name = min(new.keys() ^ old.keys())
        raise RolloutError(f"{name} is {'missing' if name in old else 'unknown to the model'}")
    for name, leaf in new.items():
        if leaf.shape != old[name].shape:
            _refuse(name, leaf, old[name])
    return jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), params, wanted)


def _like(params: PyTree, wanted: PyTree) -> PyTree:
    """The weights once they are cast: of the dtypes, and still in the places, that are wanted."""
    old = named_leaves(wanted)
    for name, leaf in named_leaves(params).items():
        if jnp.dtype(leaf.dtype) != jnp.dtype(old[name].dtype):
            _refuse(name, leaf, old[name])
    return jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), params, wanted)


def _refuse(name: str, leaf: jax.Array, want: jax.ShapeDtypeStruct) -> NoReturn:
    got, need = (f"{jnp.dtype(x.dtype).name} {list(x.shape)}" for x in (leaf, want))
    raise RolloutError(f"{name} is {got}, the model reads {need}")
