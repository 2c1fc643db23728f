"""A Hugging Face directory as a layout: whole tensors, experts one by one or fused as transformers 5 holds them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from megatron_rlzero.resharding.layout import Box, Piece, whole_tensors

#: names that transformers 5 has in memory in the place of those on disk
_ON_DISK, _IN_MEMORY = "backbone.", "model."
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
#: buffers that some directories keep and transformers makes from config.json
_DERIVED = (".rotary_emb.inv_freq",)


def held_pieces(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]
) -> tuple[list[Piece], list[str]]:
    """What a directory of tensors ``found`` holds, and faults: missing, extra and misshapen tensors.

    Args:
        expected: tensor -> shape as config.json implies it, experts one by one.
        found: tensor -> shape. Fused experts are ``experts.gate_up_proj`` [E, 2 I, H] (gate first), without gates
            ``experts.up_proj`` [E, I, H], and ``experts.down_proj`` [E, H, I] (transformers/models/qwen3_moe and
            nemotron_h); their pieces' local boxes are those of the tensor with its first two axes folded into one.
            ``model.`` may stand in the place of ``backbone.``.
    """
    names = _on_disk(expected, found)
    found = {names[name]: shape for name, shape in found.items()}
    shapes, pieces = _fused(expected, found)
    fused = {piece.tensor for piece in pieces}
    shapes |= {name: shape for name, shape in expected.items() if name not in fused}
    faults = [f"{n}: missing, expected {list(shape)}" for n, shape in shapes.items() if n not in found]
    faults += [
        f"{name}: found {list(shape)}, expected {list(shapes[name])}"
        for name, shape in found.items()
        if name in shapes and shape != shapes[name]
    ]
    faults += [
        f"{name}: extra, config.json implies no such tensor"
        for name in found
        if name not in shapes and not name.endswith(_DERIVED)
    ]
    held = {there: name for name, there in names.items()}
    pieces = [*whole_tensors({n: s for n, s in shapes.items() if n in expected}), *pieces]
    return [piece._replace(local=held.get(piece.local, piece.local)) for piece in pieces], faults


def _on_disk(expected: Iterable[str], found: Iterable[str]) -> dict[str, str]:
    """Tensor of a directory -> its name where files have the names that they are published with."""
    memory = any(n.startswith(_ON_DISK) for n in expected) and not any(n.startswith(_ON_DISK) for n in found)
    renamed = lambda n: _ON_DISK + n.removeprefix(_IN_MEMORY) if memory and n.startswith(_IN_MEMORY) else n  # noqa: E731
    return {name: renamed(name) for name in found}


def _fused(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, tuple[int, ...]], list[Piece]]:
    """Expected shapes of the fused tensors that there are, and their pieces."""
    shapes: dict[str, tuple[int, ...]] = {}
    pieces = []
    for name, prefix, expert, kind, (rows, columns) in _experts(expected):
        gated = kind != "down" and f"{prefix}.{expert}.gate_proj.weight" in expected
        local = f"{prefix}.gate_up_proj" if gated else f"{prefix}.{kind}_proj"
        if local not in found:
            continue
        height = 2 * rows if gated else rows
        first = expert * height + (rows if gated and kind == "up" else 0)
        pieces.append(Piece(name, Box.whole((rows, columns)), local, Box((first, 0), (first + rows, columns))))
        count = max(expert + 1, shapes.get(local, (0,))[0])
        shapes[local] = (count, height, columns)
    return shapes, pieces


def _experts(expected: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, str, int, str, tuple[int, ...]]]:
    for name, shape in expected.items():
        if match := _EXPERT.fullmatch(name):
            yield name, match[1], int(match[2]), match[3], shape
