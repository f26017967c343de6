"""Packing: responses with their prompts laid end to end in rows of one static shape."""

import numpy as np

from s3ac_jax.core.types import Packed, Scored


def worst_case_rows(num_responses: int, *, pack_tokens: int, longest: int, multiple: int) -> int:
    """Rows that are enough whatever the lengths, rounded up to `multiple`.

    First fit opens a new row only when the item fits nowhere, and then every open row but the
    last holds at least pack_tokens // longest items.
    Raises ValueError when one prompt plus response exceeds a row.
    Source: ours: static shapes, so that no length ever compiles anew.
    """
    if longest > pack_tokens:
        raise ValueError(
            f"pack_tokens = {pack_tokens} is shorter than the longest prompt plus response "
            f"({longest} tokens); raise train.pack_tokens or lower the rollout limits"
        )
    rows = -(-num_responses // (pack_tokens // longest))
    return -(-rows // multiple) * multiple


def _first_fit(lengths: np.ndarray, pack_tokens: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Row and offset of each item, longest first, and the number of rows."""
    row, offset = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    used = np.zeros(len(lengths) + 1, np.int64)
    for item in np.argsort(-lengths, kind="stable"):
        row[item] = np.argmax(used + lengths[item] <= pack_tokens)
        offset[item] = used[row[item]]
        used[row[item]] += lengths[item]
    return row, offset, int(np.count_nonzero(used))


def pack(scored: Scored, rows: np.ndarray, *, pack_tokens: int, max_rows: int) -> Packed:
    """Packs the responses `rows` of a scored rollout into [max_rows, pack_tokens].

    `Packed.response` keeps their number in the whole rollout. Every response token is trainable,
    the stop token included; masks come from lengths, never from token ids.
    Raises ValueError when they need more than max_rows, or one is longer than a row.
    Source: ours: first fit decreasing (Johnson 1974) over items, vectorised over tokens.
    """
    rollout, prompt = scored.rollout, scored.rollout.prompt
    num_prompt, num_response = prompt.num_tokens[rows], rollout.num_tokens[rows]
    lengths = (num_prompt + num_response).astype(np.int64)
    if lengths.max(initial=0) > pack_tokens:
        raise ValueError(
            f"a prompt plus response of {lengths.max()} tokens does not fit into a packed row of "
            f"{pack_tokens}; raise train.pack_tokens"
        )
    row, offset, used = _first_fit(lengths, pack_tokens)
    if used > max_rows:
        raise ValueError(f"{len(rows)} responses need {used} rows, room is for {max_rows}")
    # One entry per token: which item, and its place in the item.
    item = np.repeat(np.arange(len(rows)), lengths)
    place = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    at = (row[item], offset[item] + place)
    # Segment number: rank of the item among those of its row.
    order = np.lexsort((offset, row))
    first = np.searchsorted(row[order], row[order])
    segment = np.empty(len(rows), np.int64)
    segment[order] = np.arange(len(rows)) - first + 1

    response_place = place - num_prompt[item]
    trainable = response_place >= 0
    source = rows[item]
    clipped = np.maximum(response_place, 0)
    from_prompt = prompt.tokens[source, np.minimum(place, prompt.tokens.shape[1] - 1)]
    token = np.where(trainable, rollout.tokens[source, clipped], from_prompt)
    last = trainable & (response_place == num_response[item] - 1)

    def laid(values, dtype, fill=0):
        out = np.full((max_rows, pack_tokens), fill, dtype)
        out[at] = values
        return out

    return Packed(
        tokens=laid(token, np.int32),
        segment_ids=laid(segment[item], np.int32),
        positions=laid(place, np.int32),
        mask=laid(trainable, bool),
        response=laid(source, np.int32, -1),
        num_trainable=laid(num_response[item], np.int32),
        reward=laid(np.where(last, scored.reward[source], 0.0), np.float32),
        logp_rollout=laid(np.where(trainable, rollout.logp[source, clipped], 0.0), np.float32),
        rows=np.int32(used),
        routing=_routing(rollout.routing, at, source, place, (max_rows, pack_tokens)),
    )


def _routing(
    recorded: np.ndarray | None,
    at: tuple[np.ndarray, np.ndarray],
    source: np.ndarray,
    place: np.ndarray,
    shape: tuple[int, int],
) -> np.ndarray | None:
    if recorded is None:
        return None
    out = np.full((*shape, *recorded.shape[2:]), -1, recorded.dtype)
    out[at] = recorded[source, place]
    return out
