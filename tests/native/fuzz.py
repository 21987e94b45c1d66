"""Calls the handlers of the CPU extension with random operands, results and attributes, of which most do not fit.

    python tests/native/fuzz.py --calls 10000 --seed 7

Every call must either succeed and write all of its results, or raise an error of XLA. Calls run in worker processes.
After a crash or a call that does not return, this script prints the call and the command that repeats it, and starts
another worker. `make fuzz` runs the script with the extension under ASan and UBSan. malloc fills memory with ones, so
that unwritten results are found: no handler computes a NaN of these bits.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import ctypes
import dataclasses
import functools
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

DEVICES = 4
SECONDS_TO_START, SECONDS_PER_CALL = 120.0, 60.0  # after which a worker, or a call, hangs
CALLS_PER_WORKER = 1000  # whose programs XLA keeps memory of
MOST_BYTES = 2**19  # of an array, so that calls are short

F32, BF16, F16 = (np.dtype(dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.float16))
E4M3, E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)
S32, U8 = np.dtype(np.int32), np.dtype(np.uint8)
PLAIN = (F32, BF16, F16)  # of operands of products
WIDE = (F32, BF16)  # of all else
OTHERS = (np.dtype(np.bool_), np.dtype(np.int8), np.dtype(np.uint32), np.dtype(jnp.float8_e4m3b11fnuz),
          np.dtype(jnp.int4), np.dtype(np.complex64))  # fmt: skip

SMALL = (1, 1, 2, 3, 5, 16, 17, 127, 128, 129, 256)
HUGE = (2**24, 2**30, 2**31 - 1, 2**31, 2**32, 2**33 + 1, 2**40, 2**61, 2**62, 2**63 - 1)
INTEGERS = (2**63 - 1, 2**62, 2**62 + 1, 2**61, 2**32, 2**31, -1, -2, -(2**62), -(2**63), 0, 1, 2, 3, 4, 7)
TEXTS = ("", "none", "tensor", "row", "block", "auto", "te_jax", "unknown", "x" * 10_000, "é\n%s%n")
FLOATS = tuple(np.float32(x) for x in (math.nan, math.inf, -math.inf, -1, -0.0, 0, 1e-45, 1e-30, 0.05, 1e8, 3e38))

Shape = tuple[int, ...]
Array = tuple[Shape, np.dtype]


@dataclasses.dataclass
class Call:
    target: str
    operands: list[Array]
    results: list[Array]
    attributes: dict[str, Any]
    devices: int = 1
    aliases: dict[int, int] = dataclasses.field(default_factory=dict)

    def working_memory(self) -> set[int]:
        """Results that calls need not write."""
        if self.target == "te_gemm":
            return {2}
        if self.target.startswith("te_offload"):
            return set(range(len(self.results)))
        if self.target == "te_gemm_reduce_scatter":
            return set(range(1, len(self.results)))
        if self.target == "te_all_gather_gemm":
            products, last = self.attributes["products"], len(self.results) - 1
            return {products + 1, last} | (set() if self.attributes["keep_gathered"] else {products})
        return set()

    def __str__(self) -> str:
        def text(arrays: list[Array]) -> str:
            return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in arrays)

        attributes = ", ".join(f"{name}={value!r:.60}" for name, value in self.attributes.items())
        return f"{self.target}({text(self.operands)}) -> ({text(self.results)}) on {self.devices} with {attributes}"


class Draw(np.random.Generator):
    """Random numbers for one call: its seed and its number determine the call."""

    def __init__(self, seed: int, number: int):
        super().__init__(np.random.PCG64([seed, number]))
        self._huge = self.random() < 0.2  # extents, beside zeros

    def chance(self, probability: float) -> bool:
        return bool(self.random() < probability)

    def one(self, choices: Any) -> Any:
        return choices[int(self.integers(len(choices)))]

    def shape(self, most: int = 2, least: int = 0) -> Shape:
        return tuple(self.extent() for _ in range(int(self.integers(least, most + 1))))

    def extent(self) -> int:
        kinds = (0.35, 0.4) if self._huge else (0.06, 0.0)
        kind = self.random()
        return 0 if kind < kinds[0] else self.one(HUGE) if kind < sum(kinds) else self.one(SMALL)


# ------------------------------------------------------------------------------------------------- calls that are right


def present(draw: Draw, array: Array, probability: float = 0.5) -> Array:
    return array if draw.chance(probability) else ((0,), F32)


def blocks(extent: int) -> int:
    return -(-extent // 128)


def scaled_types(draw: Draw, scaling: str) -> tuple[np.dtype, np.dtype]:
    """Types of the two operands of a product."""
    if scaling == "none":
        return (draw.one(PLAIN),) * 2
    return draw.one([(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)])


def scale_count(scaling: str, outer: int, summed: int, *, square: bool = False) -> int:
    of_blocks = blocks(summed) * (blocks(outer) if square else outer)
    return {"none": 0, "tensor": 1, "row": outer, "block": of_blocks}[scaling]


def algorithm(draw: Draw, scaling: str) -> str:
    return "te_jax" if scaling == "block" else draw.one(["auto", "cublaslt"] + ["te_jax"] * (scaling != "none"))


def gemm(draw: Draw) -> Call:
    scaling = draw.one(["none", "none", "tensor", "row", "block"])
    in_blocks = scaling == "block"
    batch = draw.shape(1)
    outers = draw.shape(2), (draw.extent(),) if in_blocks else draw.shape(2)
    summed = (draw.extent(),) if in_blocks else draw.shape(2)
    m, n, k = (math.prod(group) for group in (*outers, summed))
    types, dtype = scaled_types(draw, scaling), draw.one(PLAIN if scaling == "none" else WIDE)
    first = [scaling == "none" and draw.chance(0.5) for _ in outers]
    operands = [
        ((*batch, *summed, *outer) if summed_first else (*batch, *outer, *summed), type_)
        for outer, summed_first, type_ in zip(outers, first, types, strict=True)
    ]
    for outer, square in ((m, False), (n, True)):
        operands.append(((math.prod(batch) * scale_count(scaling, outer, k, square=square),), F32))
    d = (*batch, *outers[0], *outers[1])
    chosen = algorithm(draw, scaling)
    gelu = scaling in ("none", "tensor") and chosen != "te_jax" and dtype != F32 and draw.chance(0.4)
    biased = (scaling != "tensor" or dtype != F32) and draw.chance(0.4)
    accumulate = not (biased or gelu) and draw.chance(0.4)
    operands.append(((*batch, n), dtype) if biased else ((0,), F32))
    operands.append((d, dtype) if accumulate else ((0,), F32))
    return Call(
        "te_gemm",
        operands,
        [(d, dtype), present(draw, (d, dtype), 0.5 * gelu), ((draw.one([0, 512]),), U8)],
        {
            "a_outer_ndim": len(outers[0]),
            "b_outer_ndim": len(outers[1]),
            "a_summed_first": first[0],
            "b_summed_first": first[1],
            "scaling": scaling,
            "gelu": gelu,
            "accumulate": accumulate,
            "fast_accumulation": draw.chance(0.5),
            "algorithm": chosen,
        },
        aliases={5: 0} if accumulate and draw.chance(0.5) else {},
    )


def gemm_sum(draw: Draw) -> Call:
    m, n, count, operands = draw.extent(), draw.extent(), draw.one([2, 3]), []
    types = scaled_types(draw, "block")
    for _ in range(count):
        k = max(draw.extent(), 1)
        scales = (scale_count("block", m, k),), (scale_count("block", n, k, square=True),)
        operands += [((m, k), types[0]), ((n, k), types[1]), *((shape, F32) for shape in scales)]
    operands += [((0,), F32)] * (12 - len(operands))
    return Call("te_gemm_sum", operands, [((m, n), draw.one(WIDE))], {})


def symmetric_gemm(draw: Draw) -> Call:
    dtype, first = draw.one([BF16, F16]), draw.chance(0.5)
    count, m, k = draw.extent(), draw.extent(), max(draw.extent(), 1)
    operand = ((count, *((k, m) if first else (m, k))), dtype)
    attributes = {"summed_first": first} | {name: draw.one([0.0, 1.0, -2.5]) for name in ("alpha", "beta", "diagonal")}
    c = present(draw, ((count, m, m), dtype))
    return Call("te_symmetric_gemm", [operand, operand, c], [((count, m, m), dtype)], attributes)


def grouped_gemm(draw: Draw) -> Call:
    scaling = draw.one(["none", "none", "tensor", "row", "block"])
    plain, batch, sums = scaling == "none", draw.shape(1), draw.chance(0.5)
    groups, parts = draw.one([0, 1, 2, 5]), 1 if sums else draw.one([1, 1, 2, 3])
    rows, wide, n = draw.extent() * parts, draw.extent(), draw.extent()
    (m, k), types, dtype = (wide, rows) if sums else (rows, wide), scaled_types(draw, scaling), draw.one(WIDE)
    b_summed_first = plain if sums else plain and draw.chance(0.5)
    a = (k, m) if sums and plain else (m, k)
    b = (k, n) if b_summed_first else (n, k)
    b, d = (b, (groups, m, n)) if sums else ((groups, *b), (m, n))
    operands = [((*batch, *a), types[0]), ((*batch, *b), types[1])]
    examples, members = math.prod(batch), 1 if sums else groups
    operands.append(((examples * scale_count(scaling, m, k),), F32))
    operands.append(((examples * members * scale_count(scaling, n, k, square=True),), F32))
    operands.append(((*batch, parts, groups + 1), S32))
    biased, accumulate = not sums and draw.chance(0.4), sums and draw.chance(0.5)
    operands.append(((*batch, groups, n), dtype) if biased else ((0,), F32))
    operands.append(((*batch, *d), dtype) if accumulate else ((0,), F32))
    of_pairs = not sums and scaling in ("none", "block") and draw.chance(0.4)
    operands += operands[:4] if of_pairs else [((0,), F32)] * 4
    return Call(
        "te_grouped_gemm",
        operands,
        [((*batch, *d), dtype)],
        {"grouped_sums": sums, "b_summed_first": b_summed_first, "scaling": scaling, "accumulate": accumulate},
        aliases={6: 0} if accumulate and draw.chance(0.5) else {},
    )


def quantization(draw: Draw) -> Call:
    batch, row, col = draw.shape(1), draw.shape(2), draw.shape(2)
    examples, rows, cols = (math.prod(group) for group in (batch, row, col))
    x = ((*batch, *row, *col), draw.one(WIDE))
    attributes: dict[str, Any] = {"row_ndim": len(row), "batch_ndim": len(batch)}

    def floats(count: int) -> Array:
        return ((examples * count,), F32)

    families = ["amax_tensor", "amax_rows", "quantize_tensor", "quantize_rows", "quantize_blocks"]
    family = draw.one([*families, "quantize_blocks_of_rows"])
    operands = [x]
    if family == "quantize_blocks_of_rows":
        row = (draw.extent(),)
        rows, operands = row[0], [((*batch, draw.extent(), *col), x[1]), ((*batch, *row), S32)]
        operands.append(((*batch, blocks(rows)), S32) if draw.chance(0.7) else ((0,), S32))
        attributes = {"batch_ndim": len(batch)}
    if family == "amax_tensor":
        return Call("te_amax_tensor", [x], [floats(1)], attributes)
    if family == "amax_rows":
        return Call("te_amax_rows", [x], [present(draw, floats(rows)), present(draw, floats(cols))], attributes)
    code, absent = draw.one([E4M3, E5M2]), ((0,), F32)
    copies = [draw.chance(0.6), draw.chance(0.6)]
    data = (x[0], code) if copies[0] else absent
    transposed = ((*batch, *col, *row), code) if copies[1] or not copies[0] else absent
    here = [math.prod(copy[0]) > 0 for copy in (data, transposed)]  # scales are absent with their copy
    sums = present(draw, floats(blocks(rows) * cols))
    attributes["power_of_two_scales"] = draw.chance(0.5)
    if family.startswith("quantize_blocks"):
        square = [draw.chance(0.5), draw.chance(0.5)]
        counts = (
            blocks(cols) * (blocks(rows) if square[0] else rows),
            blocks(rows) * (blocks(cols) if square[1] else cols),
        )
        scales = [floats(count) if is_here else absent for count, is_here in zip(counts, here, strict=True)]
        attributes |= {"data_128x128": square[0], "transposed_128x128": square[1]}
        results = [data, scales[0], transposed, scales[1], *([sums] if family == "quantize_blocks" else [])]
        return Call(f"te_{family}", operands, results, attributes)
    counts = (rows, cols) if family == "quantize_rows" else (1, 1)
    scales = [floats(count) if is_here else absent for count, is_here in zip(counts, here, strict=True)]
    if family == "quantize_rows":
        return Call("te_quantize_rows", [x, *scales], [data, transposed, *scales, sums], attributes)
    results = [data, transposed, *scales, present(draw, floats(1)), sums]
    return Call("te_quantize_tensor", [x, floats(1)], results, attributes)


def activation(draw: Draw) -> Call:
    batch, row, col = draw.shape(1), draw.shape(2), draw.shape(2)
    examples, rows, cols = (math.prod(group) for group in (batch, row, col))
    gate, absent = ((*batch, *row, *col), draw.one(WIDE)), ((0,), F32)
    up = gate if draw.chance(0.7) else absent
    gated = math.prod(up[0]) > 0
    attributes: dict[str, Any] = {
        "kind": draw.one(["silu", "gelu", "relu", "squared_relu"]),
        "alpha": np.float32(draw.one([1.0, 1.702])),
        "limit": np.float32(draw.one([7.0, math.inf])),
        "offset": np.float32(draw.one([0.0, 1.0])),
        "row_ndim": len(row),
        "batch_ndim": len(batch),
    }

    def floats(count: int) -> Array:
        return ((examples * count,), F32)

    def copies() -> tuple[list[Array], list[bool]]:
        """data and transposed, and whether each is there: scales are absent with their copy."""
        code, wanted = draw.one([E4M3, E5M2]), draw.one([(True, True), (True, False), (False, True)])
        shapes = (gate[0], (*batch, *col, *row))
        found = [(shape, code) if is_wanted else absent for shape, is_wanted in zip(shapes, wanted, strict=True)]
        return found, [math.prod(shape) > 0 for shape, _ in found]

    def tensor() -> list[Array]:
        found, here = copies()
        scales = [floats(1) if is_here else absent for is_here in here]
        return [*found, *scales, present(draw, floats(1))]

    def in_blocks() -> list[Array]:
        found, here = copies()
        square = [attributes["data_128x128"], attributes["transposed_128x128"]]
        counts = (
            blocks(cols) * (blocks(rows) if square[0] else rows),
            blocks(rows) * (blocks(cols) if square[1] else cols),
        )
        scales = [floats(count) if is_here else absent for count, is_here in zip(counts, here, strict=True)]
        return [found[0], scales[0], found[1], scales[1]]

    def gradient(make: Callable[[], list[Array]]) -> list[Array]:
        return [*make(), present(draw, floats(blocks(rows) * cols))]

    family = draw.one(["amax", "tensor", "blocks"])
    target, backward = f"te_activation_{family}", draw.chance(0.6)
    if backward:
        target = f"te_activation_gradient_{family}"
    operands = [gate, up, *([gate] if backward else [])]
    weights = present(draw, floats(rows)) if family == "blocks" else absent
    if family == "blocks":
        operands.append(weights)
    if family == "amax":
        return Call(target, operands, [floats(1), *([floats(1) if gated else absent] * backward)], attributes)
    attributes["power_of_two_scales"] = draw.chance(0.5)
    if family == "blocks":
        attributes |= {"data_128x128": draw.chance(0.5), "transposed_128x128": draw.chance(0.5)}
    make = tensor if family == "tensor" else in_blocks
    if not backward:
        return Call(target, operands + [floats(1)] * (family == "tensor"), make(), attributes)
    results = gradient(make)
    results += gradient(make) if gated else [absent] * len(results)
    attributes["y_power_of_two_scales"] = draw.chance(0.5)
    y = ((*batch, *col, *row), draw.one([E4M3, E5M2])) if draw.chance(0.5) else absent
    y_scales = 1
    if family == "blocks":
        attributes["y_transposed_128x128"] = draw.chance(0.5)
        y_scales = blocks(rows) * (blocks(cols) if attributes["y_transposed_128x128"] else cols)
    results += [y, floats(y_scales) if math.prod(y[0]) > 0 else absent]
    if family == "blocks":
        results.append(floats(blocks(cols) * rows) if math.prod(weights[0]) > 0 else absent)
    amaxes = [floats(1), floats(1) if gated else absent, floats(1) if y != absent else absent]
    return Call(target, operands + (amaxes if family == "tensor" else []), results, attributes)


def norm(draw: Draw) -> Call:
    batch, row, cols = draw.shape(1), draw.shape(2), draw.extent()
    examples, rows = math.prod(batch), math.prod(row)
    x, absent = ((*batch, *row, cols), draw.one(WIDE)), ((0,), F32)
    centered = draw.chance(0.5)
    attributes: dict[str, Any] = {
        "epsilon": np.float32(draw.one([0.0, 1e-6])),
        "centered": centered,
        "row_ndim": len(row),
        "batch_ndim": len(batch),
    }

    def floats(count: int) -> Array:
        return ((examples * count,), F32)

    def scales(copy: Array, count: int) -> Array:
        return floats(count) if math.prod(copy[0]) > 0 else absent

    gamma, rstd = floats(cols), floats(rows)
    beta, mean = present(draw, gamma), rstd if centered else absent
    family = draw.one(["te_norm", "te_norm_tensor", "te_norm_blocks", "te_norm_gradient"])
    if family == "te_norm_gradient":
        partials = ((*batch, draw.one([1, 2, 7, rows + 3]), cols), F32)
        operands = [x, x, present(draw, x), gamma, mean, rstd]
        return Call(family, operands, [x, partials, present(draw, partials)], attributes)
    attributes["power_of_two_scales"] = draw.chance(0.5)
    code = draw.one([E4M3, E5M2])
    if family == "te_norm":
        data, amax = present(draw, (x[0], code)), present(draw, floats(1))
        operands = [x, present(draw, x), gamma, beta, amax]
        count = 1 if math.prod(amax[0]) > 0 else blocks(cols) * rows
        results = [present(draw, x), mean, rstd, present(draw, floats(1)), data, scales(data, count)]
        return Call(family, operands, results, attributes)
    wanted = draw.one([(True, True), (True, False), (False, True)])
    shapes = x[0], (*batch, cols, *row)
    data, transposed = ((shape, code) if here else absent for shape, here in zip(shapes, wanted, strict=True))
    operands = [x, gamma, beta, mean, rstd]
    if family == "te_norm_tensor":
        results = [data, transposed, scales(data, 1), scales(transposed, 1), present(draw, floats(1))]
        return Call(family, [*operands, floats(1)], results, attributes)
    square = draw.chance(0.5)
    attributes |= {"data_128x128": square, "transposed_128x128": False}
    transposed = (shapes[1], code)
    counts = blocks(cols) * (blocks(rows) if square else rows), blocks(rows) * cols
    results = [data, scales(data, counts[0]), transposed, scales(transposed, counts[1])]
    return Call(family, operands, results, attributes)


def cross_entropy(draw: Draw) -> Call:
    lead, columns = draw.shape(2), draw.extent()
    logits = ((*lead, columns), draw.one(WIDE))
    labels, row = (lead, S32), (lead, F32)
    attributes = {"softcap": np.float32(draw.one([0.0, 30.0])), "padding": draw.one([0, 0, 1, columns - 1, *INTEGERS])}
    aliases = {0: 0} if draw.chance(0.5) else {}
    terms = {name: np.float32(0.1) for name in ("uniform", "z_loss")}
    family = draw.one(["statistics", "gradient", "both", "gradient_blocks"])
    if family == "statistics":
        attributes["with_total"] = draw.chance(0.5)
        return Call("te_softmax_cross_entropy_statistics", [logits, labels], [row] * 3, attributes)
    if family == "gradient_blocks":
        wanted, square = draw.one([(True, True), (True, False), (False, True)]), [draw.chance(0.5), draw.chance(0.5)]
        rows, code, absent = math.prod(lead), draw.one([E4M3, E5M2]), ((0,), F32)
        shapes = (rows, columns), (columns, rows)
        data, transposed = ((shape, code) if here else absent for shape, here in zip(shapes, wanted, strict=True))
        counts = (
            blocks(columns) * (blocks(rows) if square[0] else rows),
            blocks(rows) * (blocks(columns) if square[1] else columns),
        )
        scales = [((count,), F32) if here else absent for count, here in zip(counts, wanted, strict=True)]
        attributes |= terms | {
            "label_smoothing": np.float32(0.1),
            "row_ndim": 1, "batch_ndim": 0, "data_128x128": square[0], "transposed_128x128": square[1],
            "power_of_two_scales": draw.chance(0.5),
        }  # fmt: skip
        operands = [((rows, columns), logits[1]), ((rows,), S32), ((rows,), F32), ((rows,), F32)]
        results = [data, scales[0], transposed, scales[1]]
        return Call("te_softmax_cross_entropy_gradient_blocks", operands, results, attributes)
    attributes |= terms | {"label_smoothing": np.float32(0.1)}
    if family == "both":
        attributes["with_total"] = draw.chance(0.5)
        aliases = {0: 3} if aliases else {}
        results = [row, row, row, logits]
        return Call("te_softmax_cross_entropy_both", [logits, labels, row], results, attributes, aliases=aliases)
    operands = [logits, labels, row, row]
    return Call("te_softmax_cross_entropy_gradient", operands, [logits], attributes, aliases=aliases)


def collective(draw: Draw) -> Call:
    devices = draw.one([1, 1, 2, DEVICES])
    size = draw.one([size for size in (1, 2, DEVICES) if devices % size == 0])
    scaling = draw.one(["none", "none", "tensor", "row", "block"])
    summed_first = scaling == "none" and draw.chance(0.5)
    attributes = {
        "algorithm": algorithm(draw, scaling),
        "call": draw.one([0, 1, *INTEGERS]),
        "fast_accumulation": draw.chance(0.5),
        "group_size": size,
        "groups": np.asarray(draw.permutation(devices), np.int64),
        "keep_gathered": draw.chance(0.5),
        "name": "fuzz",
        "products": int(draw.integers(1, 3)),
        "put": draw.chance(0.5),
        "scaling": scaling,
        "shared_bytes": 0,
        "summed_first": summed_first,
        "timeout": np.float32(30.0),
    }
    types, dtype = scaled_types(draw, scaling), draw.one(PLAIN if scaling == "none" else WIDE)
    pieces, rows, absent = draw.extent(), draw.extent(), ((0,), F32)
    workspace = ((512,), U8)  # XLA leaves out a call on several devices of which no result has elements

    def weight(n: int, k: int) -> list[Array]:
        shape = (k, n) if summed_first else (n, k)
        return [(shape, types[1]), ((scale_count(scaling, n, k, square=True),), F32)]

    def x_scales(copies: int, k: int) -> Array:
        return ((1 if scaling == "tensor" else copies * scale_count(scaling, rows, k),), F32)

    if draw.chance(0.5):
        k = draw.extent()
        attributes["products"] -= draw.chance(0.2)
        operands, results = [((pieces, rows, k), types[0]), x_scales(pieces, k)], []
        for _ in range(attributes["products"]):
            n = draw.extent()
            operands += [*weight(n, k), present(draw, ((n,), dtype), 0.3)]
            results.append(((pieces, size, rows, n), dtype))
        gathered_scales = (size * operands[1][0][0],) if scaling in ("row", "block") else (0,)
        results += [((pieces, size, rows, k), types[0]), (gathered_scales, F32)]
        for _ in range(int(draw.integers(3))):
            shape, other = draw.shape(2), draw.one([*PLAIN, E4M3, E5M2])
            operands.append((shape, other))
            results.append(((size, *shape), other))
        return Call("te_all_gather_gemm", operands, [*results, workspace], attributes, devices)
    n, operands = draw.extent(), []
    for _ in range(attributes["products"]):
        k = draw.extent()
        operands += [((pieces, size, rows, k), types[0]), x_scales(pieces * size, k), *weight(n, k)]
    biased, adds_up = draw.chance(0.3), draw.chance(0.3) and pieces * rows * n > 0
    parts = size - 1 if adds_up else 1 if size <= 2 and not biased else size
    z = (pieces, rows, n)
    results = [
        (z, dtype),
        ((parts, *z), dtype),
        ((size - 1, *z), dtype) if size > 1 and (adds_up or draw.chance(0.5)) else absent,
        ((2, *z), F32) if adds_up else absent,
        workspace,
    ]
    return Call(
        "te_gemm_reduce_scatter", [*operands, ((n,), F32) if biased else absent], results, attributes, devices
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ ways to go wrong


def change_type(draw: Draw, call: Call) -> None:
    arrays = draw.one([call.operands, call.results])
    if arrays:
        i = int(draw.integers(len(arrays)))
        arrays[i] = arrays[i][0], draw.one([*PLAIN, E4M3, E5M2, S32, U8, *OTHERS])


def change_shape(draw: Draw, call: Call) -> None:
    arrays = draw.one([call.operands, call.results])
    if not arrays:
        return
    i = int(draw.integers(len(arrays)))
    shape, kind = list(arrays[i][0]), int(draw.integers(6))
    at = int(draw.integers(len(shape))) if shape else 0
    if kind == 0:
        shape = [0]
    elif kind == 1:
        shape = list(draw.shape(4))
    elif kind == 2 or not shape:
        shape.insert(at, draw.extent())
    elif kind == 3:
        del shape[at]
    elif kind == 4:
        shape[at] = max(0, shape[at] + draw.one([-1, 1]))
    else:
        shape[at] = draw.one([0, *SMALL, *HUGE])
    arrays[i] = tuple(shape), arrays[i][1]


def change_count(draw: Draw, call: Call) -> None:
    arrays = draw.one([call.operands, call.results])
    if arrays and draw.chance(0.5):
        del arrays[int(draw.integers(len(arrays)))]
    else:
        arrays.insert(int(draw.integers(len(arrays) + 1)), (draw.shape(2), draw.one([F32, U8])))


def value_like(draw: Draw, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.one(INTEGERS)
    if isinstance(value, str):
        return draw.one(TEXTS)
    if isinstance(value, np.ndarray):
        choices = [*range(DEVICES + 1), 2**16, 2**32, 2**32 + 1, *INTEGERS]
        return np.array([draw.one(choices) for _ in range(draw.one([0, 1, 2, DEVICES, 999]))], np.int64)
    return draw.one(FLOATS)


def change_attribute(draw: Draw, call: Call) -> None:
    if call.attributes:
        name = draw.one(list(call.attributes))
        call.attributes[name] = value_like(draw, call.attributes[name])


def change_integers(draw: Draw, call: Call) -> None:
    """All at once: their sums may wrap."""
    for name, value in call.attributes.items():
        if isinstance(value, int) and not isinstance(value, bool):
            call.attributes[name] = value_like(draw, value)


def change_kind_of_attribute(draw: Draw, call: Call) -> None:
    if call.attributes:
        name = draw.one(list(call.attributes))
        call.attributes[name] = draw.one(
            [True, 7, np.int32(7), 0.5, "text", np.ones(3, np.float32), np.zeros(0, np.int64)]
        )


def drop_attribute(draw: Draw, call: Call) -> None:
    if call.attributes:
        del call.attributes[draw.one(list(call.attributes))]


def add_attribute(_: Draw, call: Call) -> None:
    call.attributes["another"] = 1


def offload(draw: Draw) -> Call:
    """The beginning of a pass, or a call of one that never began. A pass that fetches copies after its call: its slots
    would be gone."""
    stacked, last, slots = 1 + draw.extent(), draw.extent(), 1 + draw.extent()
    sizes = [1 + draw.extent() for _ in range(draw.one([1, 1, 2, 3]))]
    row = sum(-(-size // 256) * 256 for size in sizes)
    token, memory = ((1,), S32), [((count, row), U8) for count in (slots, last, stacked)]
    target = draw.one(["begin_store", "begin_store", "store", "fetch", "end_store"])
    if target == "begin_store":
        results = [token, *memory[:2], draw.one([memory[2], ((0, row), U8)])]
        stacked, *sizes = (min(number, 2**63 - 1) for number in (stacked, *sizes))  # attributes have 64 bits
        attributes = {"stacked": stacked, "sizes": np.array(sizes, np.int64)}
        return Call("te_offload_begin_store", [token], results, attributes)
    if target == "end_store":
        return Call("te_offload_end_store", [memory[2], token, memory[0]], [memory[2]], {}, aliases={0: 0})
    x, others = ((sizes[0],), U8), [token, memory[2], memory[0], memory[1]]
    if target == "store":
        return Call("te_offload_store", [x, *others], [token], {"piece": 0})
    return Call("te_offload_fetch", others, [token, x], {"piece": 0})


CHANGES = (
    *(change_type, change_shape, change_shape, change_shape, change_count),
    *(change_attribute, change_attribute, change_attribute, change_integers),
    *(change_kind_of_attribute, drop_attribute, add_attribute),
)


def fits(array: Array) -> bool:
    """Whether an array is small, and small for XLA: it walks over all extents before a zero, and ends the process where
    they overflow."""
    shape, dtype = array
    walked = shape[: shape.index(0)] if 0 in shape else shape
    return DEVICES * dtype.itemsize * math.prod(walked) <= 4 * MOST_BYTES and max(shape, default=0) < 2**63


def draw_call(seed: int, number: int) -> tuple[Call, Draw]:
    draw = Draw(seed, number)
    make: Callable[[Draw], Call] = draw.one(
        [
            gemm,
            gemm,
            gemm_sum,
            symmetric_gemm,
            grouped_gemm,
            quantization,
            activation,
            norm,
            cross_entropy,
            offload,
            *(collective,) * 2,
        ]
    )
    while True:
        call = make(draw)
        for change in (draw.one(CHANGES) for _ in range(draw.one([0, 0, 1, 1, 1, 2, 3]))):
            change(draw, call)
        work = math.prod(sum(math.prod(shape) for shape, _ in arrays) + 1 for arrays in (call.operands, call.results))
        if work < 2**36 and all(map(fits, [*call.operands, *call.results])):
            break
    call.aliases = {
        i: j
        for i, j in call.aliases.items()
        if i < len(call.operands) and j < len(call.results) and call.operands[i] == call.results[j]
    }
    # A device waits for peers that are named and do not come, for as long as it is told to.
    groups, size = call.attributes.get("groups"), call.attributes.get("group_size")
    whole = isinstance(groups, np.ndarray) and sorted(groups.tolist()) == list(range(call.devices))
    if "timeout" in call.attributes and not (whole and isinstance(size, int) and size in (1, 2, DEVICES)):
        timeout = call.attributes["timeout"]
        if isinstance(timeout, np.float32) and timeout > 0.2:
            call.attributes["timeout"] = np.float32(draw.one([0.1, math.nan, math.inf]))
    return call, draw


# ----------------------------------------------------------------------------------------------------------- the worker


def values_of(draw: Draw, array: Array, *, labels: bool) -> np.ndarray:
    shape, dtype = array
    if labels and dtype == S32:
        wrong = draw.one([-(2**31), -2, 2**31 - 1])
        return np.where(draw.random(shape) < 0.1, wrong, draw.integers(-1, 9, shape)).astype(S32)
    if dtype not in (*PLAIN, E4M3, E5M2):
        return draw.integers(0, 2, shape).astype(F32).astype(dtype)
    values = draw.uniform(0.01, 2.0, shape)
    if dtype in PLAIN and draw.chance(0.2):
        special = draw.one([math.nan, math.inf, -math.inf, 0.0, 1e-42, -3e38])
        values = np.where(draw.random(shape) < 0.1, special, values)
    with np.errstate(all="ignore"):
        return values.astype(F32).astype(dtype)


def run(call: Call, draw: Draw) -> list[jax.Array]:
    """Compiles and runs a call. Devices have operands of their own, and the first dimension of results."""
    many = call.devices > 1
    lead = (call.devices,) if many else ()
    labels = "cross_entropy" in call.target or call.target == "te_quantize_blocks_of_rows"
    # numpy refuses some arrays without elements.
    given = {
        i: values_of(draw, ((*lead, *shape), dtype), labels=labels)
        for i, (shape, dtype) in enumerate(call.operands)
        if 0 not in shape
    }
    if call.target == "te_grouped_gemm" and 4 in given and given[4].dtype == S32:
        # Mostly in order and within the rows; the handler corrects others.
        bounds = draw.integers(*draw.one([(0, 300), (0, 300), (-(2**31), 2**31)]), given[4].shape)
        given[4] = (np.sort(bounds) if bounds.ndim and draw.chance(0.7) else bounds).astype(S32)

    def local(given: dict[int, jax.Array]) -> list[jax.Array]:
        if many:
            given = {i: x[0] for i, x in given.items()}
        operands = [given[i] if i in given else jnp.zeros(*array) for i, array in enumerate(call.operands)]
        results = jax.ffi.ffi_call(
            call.target,
            [jax.ShapeDtypeStruct(*result) for result in call.results],
            has_side_effect=True,  # or XLA leaves out a call of which no result has elements
            input_output_aliases=call.aliases,
        )(*operands, **call.attributes)
        return [result[None] if many else result for result in results]

    if many:
        mesh, spec = jax.sharding.Mesh(np.array(jax.devices()[: call.devices]), "d"), jax.sharding.PartitionSpec("d")
        local = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.block_until_ready(jax.jit(local)(given))


def has_fill(result: jax.Array) -> bool:
    """Whether any value is as memory was before the call."""
    values = np.ascontiguousarray(result)
    return bool((values.view(np.uint8).reshape(-1, values.dtype.itemsize) == 0xFF).all(axis=1).any())


def outcome_of(call: Call, draw: Draw) -> str:
    try:
        results = run(call, draw)
    except jax.errors.JaxRuntimeError as error:
        ours = call.target in str(error) or f"{call.attributes.get('name')}: " in str(error)
        return "refused by a handler" if ours else "refused by XLA"
    except Exception as error:
        return f"fault: {type(error).__name__}: {error}".replace("\n", " ")
    unwritten = [
        i for i, result in enumerate(results) if result.size and i not in call.working_memory() and has_fill(result)
    ]
    return f"fault: results {unwritten} are not written" if unwritten else "succeeded"


def work(seed: int, first: int, last: int) -> None:
    """Prints a line when it is ready, and the outcome of each call."""
    from te_jax import native
    from te_jax.parallel.transports import processes

    ctypes.CDLL(None).mallopt(-6, 0x100)  # M_PERTURB: malloc fills with the complement of the lowest byte
    native.register()
    processes.introduce(jax.devices())
    working_memory = [((4096,), U8)]
    probe = Call("te_gemm", [((1, 1), F32)] * 2 + [((0,), F32)] * 4, [((1, 1), F32), ((0,), F32), *working_memory], {
        "a_outer_ndim": 1, "b_outer_ndim": 1, "a_summed_first": False, "b_summed_first": False, "scaling": "none",
        "gelu": False, "accumulate": False, "fast_accumulation": False, "algorithm": "auto",
    })  # fmt: skip
    assert has_fill(run(probe, Draw(0, 0))[2]), "memory is not filled: results that are not written would not be seen"
    print("ready", flush=True)
    for number in range(first, last):
        print(outcome_of(*draw_call(seed, number)), flush=True)
        if number % 100 == 99:
            jax.clear_caches()


# ------------------------------------------------------------------------------------------------------ its supervisor


class Worker:
    """A process that runs calls one after another."""

    def __init__(self, seed: int, first: int, last: int, errors: IO[bytes]):
        environment = dict(os.environ)
        environment["JAX_PLATFORMS"] = "cpu"
        environment["XLA_FLAGS"] = (
            f"--xla_force_host_platform_device_count={DEVICES} --xla_backend_optimization_level=0 "
            "--xla_cpu_parallel_codegen_split_count=1"
        )
        asan = [environment.get("ASAN_OPTIONS", ""), f"max_malloc_fill_size={2 * MOST_BYTES}:malloc_fill_byte=255"]
        environment["ASAN_OPTIONS"] = ":".join(filter(None, asan))
        self._errors = errors
        command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), __file__]
        self._process = subprocess.Popen(
            [*command, "--seed", str(seed), "--work", str(first), str(last)],
            env=environment, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip

    def line(self, seconds: float) -> str:
        """The next line that it prints.

        Raises:
          TimeoutError, EOFError: it does not come, because the process hangs or has ended; the message says so.
        """
        lines: list[str] = []
        output = self._process.stdout
        assert output is not None
        reader = threading.Thread(target=lambda: lines.append(output.readline()), daemon=True)
        reader.start()
        reader.join(seconds)
        if not lines:
            self._process.kill()
            self._process.wait()
            raise TimeoutError(f"did not return within {seconds:g} s")
        if not lines[0]:
            code = self._process.wait()
            self._errors.seek(0)
            report = self._errors.read().decode(errors="replace")
            found = re.search(r"^.*(runtime error|ERROR: AddressSanitizer|Check failed|what\(\))", report, re.MULTILINE)
            report = report[found.start() if found else -3000 :][:3000]
            raise EOFError(f"ended the process with {signal.Signals(-code).name if code < 0 else code}\n{report}")
        return lines[0].strip()


def outcomes_of(seed: int, first: int, last: int) -> collections.Counter[str]:
    """How many calls had which outcome. Prints faults."""
    outcomes: collections.Counter[str] = collections.Counter()
    number = first
    while number < last:
        with tempfile.TemporaryFile() as errors:
            worker = Worker(seed, number, last, errors)
            worker.line(SECONDS_TO_START)
            alive = True
            while alive and number < last:
                try:
                    outcome = worker.line(SECONDS_PER_CALL)
                except (TimeoutError, EOFError) as problem:
                    outcome, alive = f"fault: {problem}", False
                kind, _, what = outcome.partition(": ")
                outcomes[kind] += 1
                if kind == "fault":
                    again = f"python {sys.argv[0]} --seed {seed} --first {number} --calls 1"
                    print(f"call {number}: {what}\n  {draw_call(seed, number)[0]}\n  {again}", flush=True)
                number += 1
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="of the calls; by default a new one")
    parser.add_argument("--first", type=int, default=0, help="number of the first call of the seed")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="workers at the same time")
    parser.add_argument("--work", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.seed, *given.work)
        return
    print(f"seed {given.seed}", flush=True)
    begin = time.monotonic()
    last = given.first + given.calls
    parts = range(given.first, last, min(CALLS_PER_WORKER, -(-given.calls // given.jobs)))
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        run_part = functools.partial(outcomes_of, given.seed)
        outcomes = sum(
            pool.map(run_part, parts, (min(first + parts.step, last) for first in parts)), collections.Counter()
        )
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    print(f"{given.calls} calls in {time.monotonic() - begin:.0f} s: {counts}")
    if given.calls >= 100 and outcomes["succeeded"] < given.calls / 10:
        sys.exit("fewer than a tenth of the calls succeeded: this script no longer knows the handlers")
    sys.exit(1 if outcomes["fault"] else 0)


if __name__ == "__main__":
    main()
