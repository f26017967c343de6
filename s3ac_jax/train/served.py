"""What a server is given: weights from wherever a path leads, and the task's text."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from s3ac_jax.config.run import RunConfig
from s3ac_jax.core.errors import RunError
from s3ac_jax.core.trees import named_leaves
from s3ac_jax.core.types import PyTree
from s3ac_jax.data.chat import ChatTemplate, load_template
from s3ac_jax.data.hf_tokenizer import HFTokenizer, TokenizerError
from s3ac_jax.data.tokenizer import Tokenizer
from s3ac_jax.io.hf_weights import load_params, read_spec
from s3ac_jax.io.orbax_weights import load_orbax, load_role, spec_from_dict
from s3ac_jax.models.spec import DecoderSpec
from s3ac_jax.parallel import mesh as parallel
from s3ac_jax.train import keys
from s3ac_jax.train import policies as policy_files
from s3ac_jax.train.learner import params_of
from s3ac_jax.train.programs import Role, fresh_learner


class ServeError(RunError):
    """A server that can't be started; the message is one line for the user. Source: ours."""


class LoadedWeights(NamedTuple):
    """What is served. version: the tick of a run's checkpoint, 0 elsewhere. told: for people.

    Source: ours.
    """

    params: PyTree
    version: int
    told: str


class Text:
    """A tokenizer, and a chat template where there is one, as a server asks for them.

    Source: ours: `rollout.text_stream.TextTokenizer`.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None = None):
        self._tokenizer, self._template = tokenizer, template
        self._bos: dict[str, Any] = {}
        self.bos_id: int | None = None
        if isinstance(tokenizer, HFTokenizer):
            self._bos, self.bos_id = {"bos": True}, tokenizer.bos_id
        self.stop_ids = tokenizer.stop_ids

    def encode(self, text: str) -> list[int]:
        """Ids, the BOS of a bare text included. Raises ValueError. Source: ours."""
        return self._tokenizer.encode(text, **self._bos)

    def decode(self, ids: Sequence[int]) -> str:
        """Text; ids beyond the tokenizer's, which a model may have, have none. Source: ours."""
        return self._tokenizer.decode([one for one in ids if one < self._tokenizer.vocab_size])

    def chat(
        self, messages: Sequence[Mapping[str, str]], *, thinking: bool | None = None
    ) -> list[int] | None:
        """Ids of a conversation, None without a template. Raises ValueError. Source: ours."""
        if self._template is None:
            return None
        return self._tokenizer.encode(self._template.render(messages, enable_thinking=thinking))


def make_text(tokenizer: Tokenizer, *folders: str | None) -> tuple[Text, str | None]:
    """The text of the first of `folders` that has a tokenizer, and why there is no chat, if so.

    folders: of models in Hugging Face's format; where none has one, `tokenizer` is the text's.
    Raises TokenizerError when a folder's tokenizer can't be read. Source: ours.
    """
    found = [folder for folder in folders if folder and (Path(folder) / "tokenizer.json").is_file()]
    if not found:
        return Text(tokenizer), "the task's tokenizer has no chat template"
    tokenizer = HFTokenizer(found[0])
    try:
        template = load_template(found[0], tokenizer)
        template.render([{"role": "user", "content": "hello"}])
    except TokenizerError as error:
        return Text(tokenizer), str(error)
    return Text(tokenizer, template), None


class WeightsSource:
    """Reads a policy's weights for one role's network onto one mesh.

    root: the folder that updates may come from, None for all that can be read.
    Raises RunError, in one line, for anything that can't be read or is of another model.
    Source: ours: the same for the start of a server and for its later updates.
    """

    def __init__(self, config: RunConfig, role: Role, mesh: Mesh, root: str | None = None):
        self._config, self._role, self._mesh = config, role, mesh
        self._root = None if root is None else Path(root).resolve()
        network = role.network
        self._places = parallel.shardings(network.axes, network.abstract, mesh)
        self._needed = jax.eval_shape(network.in_compute_dtype, network.abstract)

    def base(self) -> LoadedWeights:
        """The config's base policy. Source: ours."""
        config = self._config
        if config.start.hf:
            return self.hf(config.start.hf)
        if config.trains_policies:
            raise ServeError(
                "this config's base policy is trained by each run (sft.embedded is False): name a "
                "run with --checkpoint"
            )
        folder, network = policy_files.embedded_folder(), self._role.network
        params = policy_files.load_policies(folder, network, ("late",))["late"]
        return LoadedWeights(self.place(params), 0, "the base policy that ships with the package")

    def hf(self, folder: str) -> LoadedWeights:
        """Weights of a Hugging Face folder; adapters of the config are fresh. Source: ours."""
        self._check(read_spec(folder), f"{folder}/config.json")
        params = load_params(folder, self._role.network, shardings=self._places, dtype=None)
        if self._config.model.lora is not None:
            key = keys.stage_key(self._config.seed, keys.ADAPTERS)
            params = params_of(fresh_learner(self._role, self._mesh, key, start=params))
        return LoadedWeights(params, 0, folder)

    def checkpoint(self, path: str) -> LoadedWeights:
        """The actor of a run (its newest checkpoint), of one checkpoint, or weights without a run.

        path: a run's workdir, its checkpoints folder, one step in there, or a folder that
        launch/convert.py or a trainer wrote. Source: ours.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise ServeError(f"no folder {path}; name a run's workdir, or weights in orbax format")
        step = int(folder.name) if folder.name.isdigit() else None
        above = folder.parent if step is not None else folder
        run = above.parent if above.name == "checkpoints" else folder
        if "model" not in _config_json(run):
            params, spec, _ = load_orbax(folder)
            self._check(spec, path)
            return LoadedWeights(self.place(params), 0, path)
        spec = spec_from_dict(_config_json(run)["model"], str(run / "config.json"))
        self._check(spec, str(run / "config.json"))
        params, tick = load_role(run / "checkpoints", "actor", step)
        return LoadedWeights(self.place(params), tick, f"the actor of {run} at tick {tick}")

    def any(self, path: str) -> PyTree:
        """The weights at a path that is one or the other, and under `root`. Source: ours."""
        if self._root is not None and not Path(path).resolve().is_relative_to(self._root):
            raise ServeError(
                f"{path} is not in {self._root}, the only folder that this server takes weights "
                "from (--weights_root)"
            )
        if "model_type" in _config_json(Path(path)):
            return self.hf(path).params
        return self.checkpoint(path).params

    def place(self, params: PyTree) -> PyTree:
        """Host arrays in the dtypes that decoding reads, in their places on the mesh.

        What is on devices already keeps its dtype. Source: ours.
        """
        wanted = named_leaves(self._needed)
        found = named_leaves(params)
        for name in sorted(wanted.keys() | found.keys()):
            shapes = [tree[name].shape if name in tree else "none" for tree in (found, wanted)]
            if shapes[0] != shapes[1]:
                raise ServeError(
                    f"{name} has shape {shapes[0]}, the config's model needs {shapes[1]}"
                )

        def put(leaf: Any, like: Any, place: Any) -> jax.Array:
            there = isinstance(leaf, jax.Array)
            return jax.device_put(leaf if there else np.asarray(leaf, like.dtype), place)

        return jax.tree.map(put, params, self._needed, self._places)

    def _check(self, spec: DecoderSpec, where: str) -> None:
        name = spec.first_difference(self._config.model)
        if name is not None:
            raise ServeError(
                f"model.{name} is {getattr(self._config.model, name)} in the config, but "
                f"{getattr(spec, name)} in {where}; use the config that they were made with"
            )


def _config_json(folder: Path) -> dict[str, Any]:
    """config.json of a run or of a Hugging Face folder; empty when there is none."""
    path = folder / "config.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ServeError(f"{path} can't be read ({error}); restore that file") from error
    return found if isinstance(found, dict) else {}
