"""Runs the straight-line PTX of `assembly` on numpy arrays, one lane per element."""

from __future__ import annotations

import re

import numpy as np

_MASK = 0xFFFFFFFF


def run_program(
    text: str,
    inputs: dict[int, np.ndarray],
    memory: np.ndarray | None = None,
    shared: np.ndarray | None = None,
) -> dict[int, np.ndarray]:
    """The outputs $0, $1, ... of a program whose inputs are given by operand number; memory, shared: uint16, read and
    written at bytes."""
    values = {f"${number}": value.astype(np.uint64) for number, value in inputs.items()}
    for name, rest in re.findall(r"^(?!\.reg)([a-z][\w.:]*) ([^;]+);", text, re.MULTILINE):
        operands = [part.strip("{}[] ") for part in rest.split(",")]
        if name == "ld.global.nc.v4.b32":
            for i, target in enumerate(operands[:4]):
                values[target] = _word(memory, values[operands[4]] + np.uint64(4 * i))
        elif name == "st.shared.v4.b32":
            base, offset = operands[0].split(" + ")
            for i, operand in enumerate(operands[1:]):
                first = (values[base] + np.uint64(int(offset) + 4 * i)) // np.uint64(2)
                shared[first] = values[operand] & np.uint64(0xFFFF)
                shared[first + np.uint64(1)] = values[operand] >> np.uint64(16)
        else:
            memories = {"ld.global.nc.u16": memory, "ld.shared.u16": shared}
            values[operands[0]] = _execute(name, [_value(one, values) for one in operands[1:]], memories.get(name))
    return {int(name[1:]): value for name, value in values.items() if name[0] == "$" and int(name[1:]) not in inputs}


def _word(memory: np.ndarray, address: np.ndarray) -> np.ndarray:
    first = (address // np.uint64(2)).astype(np.int64)
    return memory[first].astype(np.uint64) | memory[first + 1].astype(np.uint64) << np.uint64(16)


def _value(operand: str, values: dict[str, np.ndarray]) -> np.ndarray:
    return values[operand] if operand in values else np.uint64(int(operand, 0))


def _execute(name: str, a: list[np.ndarray], memory: np.ndarray | None) -> np.ndarray:
    match name:
        case "mov.b32" | "cvt.u16.u32":
            return a[0]
        case "shr.u32":
            return a[0] >> a[1]
        case "shl.b32":
            return (a[0] << a[1]) & np.uint64(_MASK)
        case "and.b32":
            return a[0] & a[1]
        case "or.b32":
            return a[0] | a[1]
        case "add.u32":
            return (a[0] + a[1]) & np.uint64(_MASK)
        case "xor.b32":
            return a[0] ^ a[1]
        case "lop3.b32":
            assert int(a[3]) == 0xCA
            return (a[0] & a[1]) | (~a[0] & a[2] & np.uint64(_MASK))
        case "prmt.b32":
            return _permute(*a)
        case "mad.wide.u32":
            return a[0] * a[1] + a[2]
        case "dp4a.u32.u32":
            octets = [[(word >> np.uint64(8 * i)) & np.uint64(255) for i in range(4)] for word in a[:2]]
            return sum((x * y for x, y in zip(*octets, strict=True)), start=a[2]) & np.uint64(_MASK)
        case "ld.global.nc.u16" | "ld.shared.u16":
            return memory[(a[0] // 2).astype(np.int64)].astype(np.uint64)
        case "cvt.f32.f16":
            half = (a[0] & np.uint64(0xFFFF)).astype(np.uint16).view(np.float16)
            return half.astype(np.float32).view(np.uint32).astype(np.uint64)
        case "cvt.rn.bf16x2.f32":
            return _rounded_bf16(a[0]) << np.uint64(16) | _rounded_bf16(a[1])
        case "fma.rn.f16x2" | "fma.rn.bf16x2":
            return _fma(a, "bf16" in name)
    raise NotImplementedError(name)


def _permute(low: np.ndarray, high: np.ndarray, selector: np.ndarray) -> np.ndarray:
    low, high, selector = np.broadcast_arrays(low, high, selector)
    octets = np.stack([(word >> np.uint64(8 * i)) & np.uint64(255) for word in (low, high) for i in range(4)])
    result = np.zeros(selector.shape, np.uint64)
    for i in range(4):
        pick = (selector >> np.uint64(4 * i)) & np.uint64(15)
        octet = np.take_along_axis(octets, (pick & np.uint64(7)).astype(np.int64)[None], 0)[0]
        sign = np.where(octet & np.uint64(128), np.uint64(255), np.uint64(0))
        result |= np.where(pick & np.uint64(8), sign, octet) << np.uint64(8 * i)
    return result


def float_halves(pair: np.ndarray, bf16: bool) -> tuple[np.ndarray, np.ndarray]:
    """The two 16-bit floats of a word, as float64."""
    halves = [((pair >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.uint32) for shift in (0, 16)]
    if bf16:
        return tuple((half << 16).view(np.float32).astype(np.float64) for half in halves)
    return tuple(half.astype(np.uint16).view(np.float16).astype(np.float64) for half in halves)


def _fma(a: list[np.ndarray], bf16: bool) -> np.ndarray:
    operands = [float_halves(np.atleast_1d(pair), bf16) for pair in a]
    result = np.uint64(0)
    for half in (0, 1):
        exact = operands[0][half] * operands[1][half] + operands[2][half]
        bits = (
            _rounded_bf16(exact.astype(np.float32).view(np.uint32).astype(np.uint64))
            if bf16
            else exact.astype(np.float16).view(np.uint16).astype(np.uint64)
        )
        result = result | bits << np.uint64(16 * half)
    return result


def _rounded_bf16(word: np.ndarray) -> np.ndarray:
    """An fp32's bits, rounded to nearest even to the upper 16."""
    return (word + np.uint64(0x7FFF) + ((word >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
