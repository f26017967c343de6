"""How vLLM, SGLang and our own server are spoken to over HTTP, token ids in and token ids out.

Paths and fields are those of the public sources of vLLM (documentation of 0.16 to 0.32) and of
SGLang in 2026. Both have to be started for it; `docs/serving.md` has the commands.
"""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol

from s3ac_jax.rollout.backend import RolloutError
from s3ac_jax.rollout.wire import ABORT, FINISH_NAMES


class CompletionRequest(NamedTuple):
    """One request. row: of the batch. top_p 1 and top_k 0: off. stop_ids: those there are.

    Source: ours.
    """

    row: int
    prompt: list[int]
    seed: int
    temperature: float
    max_tokens: int
    top_p: float
    top_k: int
    stop_ids: list[int]


class Completion(NamedTuple):
    """One response. logp: nats, one per token. finish: STOP, LENGTH or ABORT of the wire.

    version: of the weights, as the server calls it; None where it doesn't say.
    Source: ours.
    """

    tokens: list[int]
    logp: list[float]
    finish: int
    version: str | None = None


class Weights(NamedTuple):
    """What a server says of its weights. name: of its model, empty where it doesn't say.

    fingerprint, version: as for `RolloutBackend.stats`; None and 0 where it doesn't say.
    Source: ours.
    """

    name: str
    fingerprint: str | None = None
    version: int = 0


# A call: method, path, JSON body or None -> what the answer's JSON holds.
Call = Callable[..., Awaitable[Any]]


class Flavour(Protocol):
    """One kind of server. Its coroutines take the call to make.

    Source: ours.
    """

    def request(self, work: CompletionRequest, model: str | None) -> tuple[str, dict[str, Any]]:
        """Path and body of the request."""
        ...

    def answer(self, found: Any) -> Completion:
        """The response in the answer's JSON. Raises KeyError, IndexError, TypeError, ValueError."""
        ...

    async def check(self, call: Call, version: int) -> bool | None:
        """Whether the server has weights of this version; None when it can't tell."""
        ...

    async def weights(self, call: Call, model: str | None) -> Weights:
        """Which weights the server has. model: its name there, None for the only one."""
        ...

    async def reload(self, call: Call, folder: str, version: int, in_flight: bool) -> None:
        """Has the server read its weights from a folder."""
        ...

    async def abort(self, call: Call) -> bool:
        """Has the server end all responses as they are; False where it can't."""
        ...

    async def pause(self, call: Call) -> None:
        """No token until `resume`, where the server can."""
        ...

    async def resume(self, call: Call) -> None:
        """Ends a pause."""
        ...


def _sampling(work: CompletionRequest) -> dict[str, Any]:
    return {"temperature": work.temperature, "top_p": work.top_p, "stop_token_ids": work.stop_ids}


class OwnServer:
    """`launch/serve.py`. It takes no weights over HTTP.

    Source: OpenAI's API reference (completions), with vLLM's fields for token ids.
    """

    def request(self, work: CompletionRequest, model: str | None) -> tuple[str, dict[str, Any]]:
        """A completion of token ids, its log-probs and token ids asked for.

        ignore_eos: the request's stop ids are all that ends it. Source: ours.
        """
        body = {
            "prompt": work.prompt, "max_tokens": work.max_tokens, "seed": work.seed,
            "top_k": work.top_k, "logprobs": 0, "return_token_ids": True, "ignore_eos": True,
            **_sampling(work),
        }  # fmt: skip
        return "/v1/completions", body | ({} if model is None else {"model": model})

    def answer(self, found: Any) -> Completion:
        """The first choice. Source: ours."""
        (choice,) = found["choices"]
        finish = FINISH_NAMES.index(choice["finish_reason"])
        # An aborted request may have nothing to report.
        logprobs = choice["logprobs"] if finish != ABORT or choice["token_ids"] else None
        logp = [] if logprobs is None else logprobs["token_logprobs"]
        named = found.get("system_fingerprint") or ""
        version = named.removeprefix("weights-") if named.startswith("weights-") else None
        return Completion(choice["token_ids"], logp, finish, version)

    async def check(self, call: Call, version: int) -> bool | None:
        """Whether it is there. Source: ours."""
        await call("GET", "/health")

    async def weights(self, call: Call, model: str | None) -> Weights:
        """Of /v1/models, whose fingerprint is our own server's. Source: OpenAI's API reference."""
        found = await call("GET", "/v1/models")
        listed = found.get("data") if isinstance(found, dict) else None
        for one in listed if isinstance(listed, list) else []:
            if isinstance(one, dict) and model in (None, one.get("id")):
                said, version = one.get("fingerprint"), one.get("version")
                return Weights(
                    str(one.get("id", "")),
                    said if isinstance(said, str) else None,
                    version if isinstance(version, int) else 0,
                )
        return Weights(model or "")

    async def reload(self, call: Call, folder: str, version: int, in_flight: bool) -> None:
        """Refused. Source: ours."""
        raise RolloutError(
            "our own server takes no weights over HTTP: train with rollout.backend=remote"
        )

    async def abort(self, call: Call) -> bool:
        """It frees the slots of a client that leaves. Source: ours."""
        return False

    async def pause(self, call: Call) -> None:
        """Nothing: no more is sent, what is under way ends. Source: ours."""

    async def resume(self, call: Call) -> None:
        """Nothing. Source: ours."""


class Vllm(OwnServer):
    """vLLM and vLLM-TPU, with VLLM_SERVER_DEV_MODE=1 and --logprobs-mode processed_logprobs.

    Without the latter vLLM reports log-probs of temperature 1, whatever was sampled from. With it
    they are those of the distribution that top_p or top_k have cut, which no trainer reads: these
    two are refused.
    Source: vLLM, entrypoints/openai/completion/protocol.py and entrypoints/serve/dev.
    """

    def request(self, work: CompletionRequest, model: str | None) -> tuple[str, dict[str, Any]]:
        """As OwnServer's, without cuts. Source: vLLM."""
        if work.top_p < 1 or work.top_k > 0:
            raise RolloutError(
                "vLLM reports log-probs of the distribution that top_p and top_k have cut: use "
                "top_p 1 and top_k 0"
            )
        return super().request(work, model)

    async def reload(self, call: Call, folder: str, version: int, in_flight: bool) -> None:
        """Pause, reload_weights on every worker, empty the caches, resume.

        A server that could not load is left paused: its weights may be half of each.
        Source: vLLM.
        """
        await call("POST", f"/pause?mode={'keep' if in_flight else 'wait'}")
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        await call("POST", "/collective_rpc", body)
        # Keys and values of the old weights must not outlive them, those of frozen requests too.
        found = await call("POST", "/reset_prefix_cache?reset_running_requests=true")
        if isinstance(found, dict) and found.get("success") is False:
            raise RolloutError("/reset_prefix_cache: the caches of the old weights are still there")
        await call("POST", "/resume")

    async def abort(self, call: Call) -> bool:
        """A pause that ends all responses, and its end. Source: vLLM."""
        await call("POST", "/pause?mode=abort")
        await call("POST", "/resume")
        return True

    async def pause(self, call: Call) -> None:
        """Requests stay frozen where they are. Source: vLLM."""
        await call("POST", "/pause?mode=keep")

    async def resume(self, call: Call) -> None:
        """Ends a pause. Source: vLLM."""
        await call("POST", "/resume")


class Sglang:
    """SGLang's native API. Seeds count with --enable-deterministic-inference only.

    The model's own end token ends a response too: it must be among the stop ids. (ignore_eos would
    switch off all of them.)
    Source: SGLang, docs/advanced_features/sglang_for_rl.md, srt/sampling/sampling_params.py,
    srt/managers/io_struct.py.
    """

    def request(self, work: CompletionRequest, model: str | None) -> tuple[str, dict[str, Any]]:
        """A native generate call. Source: SGLang."""
        sampling = {
            "max_new_tokens": work.max_tokens, "top_k": work.top_k or -1,
            "sampling_seed": work.seed, "no_stop_trim": True, "skip_special_tokens": False,
            **_sampling(work),
        }  # fmt: skip
        body = {"input_ids": work.prompt, "sampling_params": sampling, "return_logprob": True}
        return "/generate", body | {"logprob_start_len": -1, "stream": False}

    def answer(self, found: Any) -> Completion:
        """Token ids stand beside their log-probs. Source: SGLang."""
        meta = found["meta_info"]
        pairs = meta["output_token_logprobs"]
        finish = FINISH_NAMES.index(meta["finish_reason"]["type"])
        tokens = [pair[1] for pair in pairs]
        if "output_ids" in found and finish != ABORT and found["output_ids"] != tokens:
            raise ValueError("output_ids and output_token_logprobs name other tokens")
        return Completion(tokens, [pair[0] for pair in pairs], finish, meta.get("weight_version"))

    async def check(self, call: Call, version: int) -> bool | None:
        """Whether weight_version is this one. Source: SGLang."""
        found = await call("GET", "/get_model_info")
        named = found.get("weight_version") if isinstance(found, dict) else None
        return None if named is None else named == str(version)

    async def weights(self, call: Call, model: str | None) -> Weights:
        """The folder it has read, and what its weights are called. Source: SGLang."""
        found = await call("GET", "/get_model_info")
        said = found if isinstance(found, dict) else {}
        parts = (model or said.get("model_path"), said.get("weight_version"))
        return Weights(", version ".join(str(one) for one in parts if one))

    async def reload(self, call: Call, folder: str, version: int, in_flight: bool) -> None:
        """update_weights_from_disk, which waits for what is under way unless that is paused.

        Source: SGLang.
        """
        if in_flight:
            await call("POST", "/pause_generation", {"mode": "retract"})
        body = {"model_path": folder, "flush_cache": True, "weight_version": str(version)}
        found = await call("POST", "/update_weights_from_disk", body)
        if not isinstance(found, dict) or found.get("success") is not True:
            said = found.get("message") if isinstance(found, dict) else found
            raise RolloutError(f"/update_weights_from_disk of {folder}: {said}")
        if in_flight:
            await call("POST", "/continue_generation", {})

    async def abort(self, call: Call) -> bool:
        """All requests of the server. Source: SGLang."""
        await call("POST", "/abort_request", {"abort_all": True})
        return True

    async def pause(self, call: Call) -> None:
        """Requests stay where they are. Source: SGLang."""
        await call("POST", "/pause_generation", {"mode": "in_place"})

    async def resume(self, call: Call) -> None:
        """Ends a pause. Source: SGLang."""
        await call("POST", "/continue_generation", {})


FLAVOURS: dict[str, type[Flavour]] = {"vllm": Vllm, "sglang": Sglang, "s3ac": OwnServer}
