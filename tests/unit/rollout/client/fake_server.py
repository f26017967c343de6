"""A gRPC server that speaks our protocol and answers by arithmetic, with faults by script."""

import collections
import json
import threading
import time
from concurrent import futures

import grpc
import numpy as np

from s3ac_jax.rollout import rollout_pb2 as pb
from s3ac_jax.rollout.weights_wire import Receiver, WeightsWireError, read_manifest
from s3ac_jax.rollout.wire import (
    ABORT,
    LENGTH,
    METHODS,
    SERVICE,
    STOP,
    Responses,
    kind,
    pack_responses,
    unpack_requests,
)

VOCAB = 17


def response(prompt, seed, max_tokens):
    """The made-up response to one request: token ids, log-probs, and whether it stopped."""
    count = 1 + int(seed) % int(max_tokens)
    tokens = [(int(sum(prompt)) + 3 * int(seed) + i) % VOCAB for i in range(count)]
    return tokens, [-(token + 1) / 8 for token in tokens], int(seed) % 2 == 0


def experts(tokens):
    """The made-up experts of a sequence [T, 2, 2]; its last token is never read."""
    tokens = np.asarray(tokens)
    made = (tokens[:, None, None] + np.arange(4).reshape(2, 2)) % 6
    made[-1] = -1
    return made.astype(np.int16)


class FakeServer:
    """faults: what the next Generate calls do instead of answering; see `_fault`.

    push_fault, cheap_fault, pause_fault: status and text that these calls end with. push_slow:
    seconds before the weights are read. spoil: what changes an answer. claims: the version that
    tokens are marked with. seen: the names of the calls so far; asked: request ids; batches:
    requests of each Generate that was answered.
    """

    def __init__(self, abstract, *, version=-1, fingerprint="none", slow=0.0, routing=True):
        self.abstract, self.slow, self.routing = abstract, slow, routing
        self.start_with = version, fingerprint
        self.faults = collections.deque()
        self.seen, self.asked, self.batches, self.aborted, self.metadata = [], [], [], set(), {}
        self.claims = self.spoil = None
        self.push_fault = self.cheap_fault = self.pause_fault = None
        self.push_slow = 0.0
        self.weights, self.mute = None, False
        self.paused, self.is_live = False, True
        self.stopping = threading.Event()
        self.port = 0
        self.start()

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def start(self):
        self.version, self.fingerprint = self.start_with
        self.stopping.clear()
        handlers = {
            name: getattr(grpc, f"{kind(method)}_rpc_method_handler")(
                getattr(self, name), method.request.FromString, method.reply.SerializeToString
            )
            for name, method in METHODS.items()
            if hasattr(self, name)
        }
        pool = futures.ThreadPoolExecutor(16)
        self.server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers),)
        )
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        self.server.start()

    def stop(self):
        """As when the process is killed: calls in progress are lost."""
        self.stopping.set()
        self.server.stop(0).wait()

    def note(self, name, context):
        self.seen.append(name)
        self.metadata = dict(context.invocation_metadata())

    def Stats(self, _, context):
        self.note("Stats", context)
        if self.mute:
            self.stopping.wait(5)
        found = {
            "version": self.version, "fingerprint": self.fingerprint, "slots": 4,
            "paused": self.paused, "is_live": self.is_live,
        }  # fmt: skip
        return pb.StatsReply(json=json.dumps(found))

    def Generate(self, message, context):
        self.note("Generate", context)
        requests = unpack_requests(message)
        self.asked.append(requests.request_id)
        if self.faults:
            self.fault(self.faults.popleft(), context)
        if requests.weights_fingerprint != self.fingerprint:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "for other weights")
        while self.paused and context.is_active() and not self.stopping.is_set():
            time.sleep(0.005)
        starts = np.cumsum([0, *requests.lengths])
        made, sampling = [], requests.sampling
        until = time.monotonic() + self.slow
        while time.monotonic() < until and not self.stopping.is_set():
            if requests.request_id in self.aborted:
                break
            time.sleep(0.005)
        prompts = []
        for number, row in enumerate(requests.prompt_row):
            prompt = requests.tokens[starts[row] : starts[row + 1]]
            tokens, logp, stopped = response(
                prompt, sampling.seed[number], sampling.max_tokens[number]
            )
            finish = STOP if stopped else LENGTH
            if requests.request_id in self.aborted:
                tokens, logp, finish = tokens[:1], logp[:1], ABORT
            made.append((tokens, logp, finish))
            prompts.append(prompt.tolist())
        self.batches.append(prompts)
        tokens, logp, finish = zip(*made, strict=True)
        flat = np.concatenate(tokens)
        routing = None
        if requests.want_routing and self.routing:
            routing = np.concatenate([experts(p + t) for p, t in zip(prompts, tokens, strict=True)])
        version = self.version if self.claims is None else self.claims
        responses = Responses(
            np.array([len(t) for t in tokens]), flat, np.concatenate(logp),
            np.full(len(flat), version), np.array(finish), routing,
        )  # fmt: skip
        return pack_responses(self.spoil(responses) if self.spoil else responses)

    def fault(self, what, context):
        if what == "hang":
            self.mute = True
            self.stopping.wait(5)
        elif what == "die":
            threading.Thread(target=self.stop).start()
            self.stopping.wait(5)
            time.sleep(0.2)
        else:
            context.abort(what, f"no {what.name.lower()}\n today")

    def Abort(self, message, context):
        self.note("Abort", context)
        self.aborted |= set(message.request_id)
        return pb.AbortReply(aborted=len(message.request_id))

    def UpdateWeights(self, message, context):
        self.note("UpdateWeights", context)
        self.path = message.path
        if message.path:
            self.fingerprint = message.fingerprint
        elif self.cheap_fault:
            context.abort(*self.cheap_fault)
        elif message.fingerprint != self.fingerprint:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "other weights")
        self.version = message.version
        return pb.WeightsReply(version=self.version, fingerprint=self.fingerprint)

    def PushWeights(self, messages, context):
        self.note("PushWeights", context)
        if self.push_fault:
            context.abort(*self.push_fault)
        self.stopping.wait(self.push_slow)
        try:
            manifest = read_manifest(next(messages).manifest)
            receiver = Receiver(manifest, self.abstract)
            for message in messages:
                receiver.feed(message.data)
            self.weights = receiver.finish()
        except WeightsWireError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        self.in_flight = manifest.in_flight
        self.version, self.fingerprint = manifest.version, manifest.fingerprint
        return pb.WeightsReply(version=self.version, fingerprint=self.fingerprint)

    def Pause(self, _, context):
        self.note("Pause", context)
        if self.pause_fault:
            context.abort(*self.pause_fault)
        self.paused = True
        return pb.Empty()

    def Resume(self, _, context):
        self.note("Resume", context)
        self.paused = False
        return pb.Empty()
