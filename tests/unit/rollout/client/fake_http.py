"""HTTP endpoints that answer as vLLM, SGLang and our own server do, out of a table."""

import asyncio
import collections
import contextlib
import json
import threading

from aiohttp import web


class FakeEndpoint:
    """table: (prompt, seed) -> (token ids, log-probs, finish reason).

    faults: what the next generate calls do instead of answering: an HTTP status, "cut" (the
    connection), or a function that spoils the answer's JSON, or its text when it returns that.
    calls: (method, path with query, body) of all but generate calls. bodies: of generate calls.
    """

    def __init__(self, kind, table, *, slow=0.0):
        self.kind, self.table, self.slow = kind, table, slow
        self.faults = collections.deque()
        self.calls, self.bodies, self.headers = [], [], {}
        self.control = {}  # path -> (status, JSON) other than success
        self.weights = "default"
        self.open = self.most_open = 0
        self.connections = set()
        self.port = 0
        self.aborting = None
        self.start()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self._wait(self._open())

    def stop(self):
        if not self.loop.is_closed():
            self._wait(self._close())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.loop.close()

    async def _close(self):
        await self.runner.cleanup()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _wait(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    async def _open(self):
        app = web.Application()
        path = "/generate" if self.kind == "sglang" else "/v1/completions"
        app.router.add_post(path, self.generate)
        app.router.add_route("*", "/{path:.*}", self.other)
        self.aborting = asyncio.Event()
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]

    async def generate(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.headers = dict(request.headers)
        self.connections.add(request.transport)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            fault = self.faults.popleft() if self.faults else None
            if isinstance(fault, int):
                return web.json_response({"error": {"message": "not\nnow"}}, status=fault)
            if fault == "cut":
                request.transport.abort()
                return web.Response()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.aborting.wait(), self.slow or 1e-4)
            found = getattr(self, f"_{self.kind}")(body)
            if fault is not None:
                found = fault(found) or found
            text = found if isinstance(found, str) else json.dumps(found)
            return web.Response(text=text, content_type="application/json")
        finally:
            self.open -= 1

    def _row(self, prompt, seed, limit):
        tokens, logp, finish = self.table[tuple(prompt), seed]
        assert len(tokens) <= limit
        if self.aborting.is_set():
            return tokens[:1], logp[:1], "abort"
        return [*tokens], [*logp], finish  # a fault may spoil them

    def _vllm(self, body):
        """CompletionResponse of vLLM's entrypoints/openai/completion/protocol.py."""
        assert body["ignore_eos"] is True
        assert body["return_token_ids"] is True
        tokens, logp, finish = self._row(body["prompt"], body["seed"], body["max_tokens"])
        choice = {
            "index": 0, "text": "".join(map(chr, tokens)), "finish_reason": finish,
            "stop_reason": tokens[-1] if finish == "stop" else None,
            "token_ids": tokens, "prompt_logprobs": None, "prompt_token_ids": body["prompt"],
            "logprobs": {
                "text_offset": list(range(len(tokens))), "token_logprobs": logp,
                "tokens": list(map(chr, tokens)), "top_logprobs": [{} for _ in tokens],
            },
        }  # fmt: skip
        used = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(tokens)}
        return {
            "id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m",
            "choices": [choice], "usage": used, "system_fingerprint": None,
        }  # fmt: skip

    def _s3ac(self, body):
        return self._vllm(body) | {"system_fingerprint": "weights-12"}

    def _sglang(self, body):
        """Of SGLang's /generate: log-prob, id and text of each token, beside output_ids."""
        sampling = body["sampling_params"]
        tokens, logp, finish = self._row(
            body["input_ids"], sampling["sampling_seed"], sampling["max_new_tokens"]
        )
        reason = {"type": finish}
        if finish == "stop":
            reason["matched"] = tokens[-1]
        elif finish == "length":
            reason["length"] = len(tokens)
        meta = {
            "id": "1", "finish_reason": reason, "prompt_tokens": len(body["input_ids"]),
            "weight_version": self.weights, "completion_tokens": len(tokens), "e2e_latency": 0.1,
            "output_token_logprobs": [
                [one, token, None] for one, token in zip(logp, tokens, strict=True)
            ],
        }  # fmt: skip
        return {"text": "", "output_ids": tokens, "meta_info": meta}

    async def other(self, request):
        text = await request.text()
        body = json.loads(text) if text else None
        self.calls.append((request.method, request.path_qs, body))
        if request.path in self.control:
            status, found = self.control[request.path]
            return web.json_response(found, status=status)
        if request.path in ("/abort_request", "/pause") and request.query_string in (
            "",
            "mode=abort",
        ):
            self.aborting.set()
        if request.path == "/get_model_info":
            return web.json_response({"model_path": "m", "weight_version": self.weights})
        if request.path == "/update_weights_from_disk":
            self.weights = body["weight_version"]
            return web.json_response(
                {"success": True, "message": "Succeeded.", "num_paused_requests": 0}
            )
        if request.path == "/collective_rpc":
            return web.json_response({"results": [None]})
        return web.Response()
