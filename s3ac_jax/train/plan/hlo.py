"""Collectives of a compiled program, read from its text: kind, bytes, group, how often.

The text of an optimised module has one computation after the other, and one instruction per line.
A loop's body counts as often as its condition lets it: the constant there, or where a device
decides, the worst case that the caller knows.
"""

import dataclasses
import math
import re

import numpy as np

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_NAME = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b(pred|token|[a-z]+\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_OPERAND = re.compile(r"%([\w.\-]+)")
KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute",
    "ragged-all-to-all", "collective-broadcast",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction. payload: bytes of the whole array that a group of devices ends up with, or
    begins with where it is scattered. groups: devices by place. times: it runs in one call.
    operation: the name of what it was in the program. Source: ours.
    """

    kind: str
    payload: float
    groups: tuple[tuple[int, ...], ...]
    times: float
    operation: str

    @property
    def sent(self) -> float:
        """Bytes that a device sends in one call of the program, in a ring.

        Source: Bandwidth optimal all-reduce (Patarasu & Yuan 2009), section 3.
        """
        size = max(map(len, self.groups), default=1)
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.payload * self.times
        passes = 2 if self.kind == "all-reduce" else 1
        return passes * self.payload * (size - 1) / size * self.times


@dataclasses.dataclass
class _Instruction:
    name: str
    shape: str
    opcode: str
    operands: list[str]
    attributes: str
    arguments: str


def collectives(text: str, *, devices: int, turns: float) -> list[Collective]:
    """All of them, in one call of the program, each as often as its loops let it run.

    devices: of the program. turns: of a loop whose end is known on the device only, at worst; such
    a loop within another counts once.
    Source: ours; ragged and broadcast collectives are counted as their plain kin.
    """
    computations, entry = _parse(text)
    found: list[Collective] = []

    def walk(name: str, times: float, in_dynamic: bool, scatters: bool) -> None:
        for one in computations.get(name, {}).values():
            kind = _kind(one.opcode)
            if kind is not None:
                groups = _groups(one.attributes, devices)
                found.append(_collective(one, kind, groups, times, scatters))
                continue
            if one.opcode == "while":
                called = dict(_calls(one))
                known = _trip_count(one, called["condition"], computations, name)
                worst = 1.0 if in_dynamic else turns
                inner = times * (worst if known is None else known)
                walk(called["body"], inner, in_dynamic or known is None, False)
                continue
            if one.opcode.endswith(("-done", "-update")):
                continue  # names what its start has begun
            for _, target in _calls(one):
                walk(target, times, in_dynamic, "all-reduce-scatter" in target)

    walk(entry, 1.0, False, False)
    return [one for one in found if max(map(len, one.groups), default=1) > 1]


def _kind(opcode: str) -> str | None:
    bare = opcode.removesuffix("-start")
    return bare if bare in KINDS else None


def _collective(
    one: _Instruction, kind: str, groups: tuple[tuple[int, ...], ...], times: float, scatters: bool
) -> Collective:
    size, payload = max(map(len, groups), default=1), nbytes(one.shape)
    if one.opcode == "all-gather-start":
        payload *= size / (size + 1)  # the result stands beside the operand
    elif one.opcode == "collective-permute-start":
        payload /= 2
    if kind == "reduce-scatter":
        payload *= size
    if kind == "all-reduce" and scatters:
        kind = "reduce-scatter"  # XLA:TPU's way to write it: a fusion with a slice
    if kind == "ragged-all-to-all":
        kind = "all-to-all"
    name = re.search(r'op_name="([^"]*)"', one.attributes)
    return Collective(kind, payload, groups, times, name[1] if name else "")


def nbytes(shape: str) -> float:
    """Bytes of an HLO shape, tuples included. Source: ours."""
    total = 0.0
    for dtype, sizes in _ARRAY.findall(shape):
        count = math.prod(int(size) for size in sizes.split(",")) if sizes else 1
        total += count * _bits(dtype) / 8
    return total


def _bits(dtype: str) -> int:
    if dtype in ("pred", "token"):
        return 8 if dtype == "pred" else 0
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 0


def _parse(text: str) -> tuple[dict[str, dict[str, _Instruction]], str]:
    """Computations by name, their instructions by name; and the entry's name."""
    computations: dict[str, dict[str, _Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        header = _COMPUTATION.match(line) if line[:1] not in (" ", "") else None
        if header is not None:
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif line.rstrip() == "}":  # attributes of a custom call may begin a line with one too
            current = None
        elif current is not None and (named := _NAME.match(line)):
            one = _instruction(named[1], named[2])
            current[one.name] = one
    return computations, entry


def _instruction(name: str, rest: str) -> _Instruction:
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opening = rest.find("(")
    if opening < 0:
        return _Instruction(name, shape, rest, [], "", "")
    closing = _closing(rest, opening)
    arguments = rest[opening + 1 : closing]
    return _Instruction(
        name, shape, rest[:opening], _OPERAND.findall(arguments), rest[closing + 1 :], arguments
    )


def _closing(text: str, opening: int) -> int:
    depth = 0
    for place in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if not depth:
            return place
    return len(text) - 1


def _calls(one: _Instruction) -> list[tuple[str, str]]:
    """(role, computation) of those that this instruction runs; what sums is left out."""
    roles = []
    for role, target in _CALLED.findall(one.attributes):
        if role == "to_apply" and one.opcode != "call":
            continue
        roles += [(role, name.strip().lstrip("%")) for name in target.strip("{}").split(",")]
    return roles


def _trip_count(
    loop: _Instruction, condition: str, computations: dict[str, dict[str, _Instruction]], where: str
) -> float | None:
    """How often a loop from 0 in steps of 1 runs; None when only the device knows."""
    told = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if told is not None:
        return float(told[1])
    body = computations.get(condition, {})
    limits: list[float] = []
    for one in body.values():
        if one.opcode == "compare" and "direction=LT" in one.attributes:
            limits += _limit(one.operands[1:2], body, loop, computations[where])
        elif one.opcode == "fusion" and one.shape.startswith("pred[]"):
            limits += _limit(one.operands, body, loop, computations[where])
    return min(limits) if limits else None


def _limit(
    names: list[str], body: dict[str, _Instruction], loop: _Instruction,
    outer: dict[str, _Instruction],
) -> list[float]:  # fmt: skip
    """Whole numbers among these operands of a condition: its own, or handed in by the loop."""
    found = []
    for name in names:
        one = _source(body, name)
        if one is not None and one.opcode == "get-tuple-element" and loop.operands:
            index = re.search(r"index=(\d+)", one.attributes)
            start = _source(outer, loop.operands[0])
            if index is None or start is None or start.opcode != "tuple":
                continue
            place = int(index[1])
            one = _source(outer, start.operands[place]) if place < len(start.operands) else None
            # The counter itself starts from a constant too.
            if one is not None and one.opcode == "constant" and one.arguments == "0":
                continue
        if one is not None and one.opcode == "constant" and re.fullmatch(r"\d+", one.arguments):
            found.append(float(one.arguments))
    return found


def _source(computation: dict[str, _Instruction], name: str) -> _Instruction | None:
    """The instruction of this name, copies looked through."""
    one = computation.get(name)
    while one is not None and one.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
        one = computation.get(one.operands[0]) if one.operands else None
    return one


def _groups(attributes: str, devices: int) -> tuple[tuple[int, ...], ...]:
    pairs = re.search(r"source_target_pairs=\{(\{[\d,{}]*\})\}", attributes)
    if pairs is not None:
        return tuple(_braced(pairs[1]))
    written = re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", attributes)
    if written is not None:
        return tuple(_braced(written[1]))
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota is not None:
        sizes = [int(size) for size in iota[3].split(",")]
        order = np.arange(math.prod(sizes)).reshape(sizes)
        if iota[4]:
            order = order.transpose([int(axis) for axis in iota[4].split(",")])
        return _rows(order.reshape(int(iota[1]), int(iota[2])))
    named = re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([\d,]*)\))? ?\{([^}]*)\}",
                      attributes)  # fmt: skip
    if named is not None:
        return _named_groups(named[1], named[2], named[3])
    return (tuple(range(devices)),)


def _braced(text: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", text)]


def _rows(groups: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, group)) for group in groups)


def _named_groups(mesh: str, ids: str | None, over: str) -> tuple[tuple[int, ...], ...]:
    """Groups along named axes of a mesh; an axis may be split: 'a':(2)3 is its part of size 3."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    total = math.prod(sizes.values())
    order = np.array([int(i) for i in ids.split(",")]) if ids else np.arange(total)
    shape: list[int] = []
    kept: list[bool] = []
    wanted = {name: (before, part) for name, before, part in
              re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", over)}  # fmt: skip
    for name, size in sizes.items():
        before, part = wanted.get(name, ("", ""))
        if part:
            split = [int(before), int(part), size // int(before) // int(part)]
            shape, kept = shape + split, [*kept, True, False, True]
        else:
            shape, kept = [*shape, size], [*kept, name not in wanted]
    axes = [n for n, keep in enumerate(kept) if keep] + [
        n for n, keep in enumerate(kept) if not keep
    ]
    grouped = order.reshape(shape).transpose(axes)
    width = math.prod(shape[n] for n in range(len(shape)) if not kept[n])
    return _rows(grouped.reshape(-1, width))
