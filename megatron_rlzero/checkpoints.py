"""Opens a checkpoint of either kind as a layout of Hugging Face tensors: a reader, and which pieces lie there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_rlzero.architectures import language_prefix
from megatron_rlzero.architectures.checkpoint_layout import stored_pieces
from megatron_rlzero.architectures.hf_layout import held_pieces
from megatron_rlzero.resharding.directories import CheckpointError, refuse_partial
from megatron_rlzero.resharding.layout import Piece
from megatron_rlzero.resharding.safetensors_files import DTYPES, SafetensorsReader
from megatron_rlzero.resharding.torch_dist import MARKER, TorchDistReader

if TYPE_CHECKING:
    from megatron_rlzero.architectures import Architecture

CONFIG = "config.json"
#: ends of names of files that hold weights, or say where they are
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".distcp", ".index.json")
FLOATS = frozenset(DTYPES.values())
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def open_checkpoint(
    directory: str | Path, family: Architecture, hf: dict[str, Any]
) -> tuple[SafetensorsReader | TorchDistReader, list[Piece], list[str]]:
    """A Hugging Face directory, or a Megatron distributed checkpoint, of the model that ``hf`` describes.

    Returns:
        The reader, the pieces that it holds (``streaming.view`` takes their local boxes), and a line for every tensor
        of the language model that is missing, extra, misshapen or of no floating-point format.

    Raises:
        CheckpointError: what cannot be opened at all.
    """
    kind = open_megatron if (Path(directory) / MARKER).is_file() else open_hf
    return kind(directory, family, hf)


def open_hf(
    directory: str | Path, family: Architecture, hf: dict[str, Any]
) -> tuple[SafetensorsReader, list[Piece], list[str]]:
    """``open_checkpoint`` for a Hugging Face directory."""
    refuse_partial(directory)
    reader = SafetensorsReader(directory)
    prefix = language_prefix(hf)
    specs = {name: spec for name, spec in reader.specs.items() if name.startswith(prefix)}
    pieces, faults = held_pieces(_expected(family, hf, reader), {n: s.shape for n, s in specs.items()})
    return reader, pieces, faults + _not_floats({n: s.dtype for n, s in specs.items()})


def open_megatron(
    directory: str | Path, family: Architecture, hf: dict[str, Any]
) -> tuple[TorchDistReader, list[Piece], list[str]]:
    """``open_checkpoint`` for a Megatron distributed checkpoint."""
    refuse_partial(directory)
    reader = TorchDistReader(directory)
    pieces, faults = stored_pieces(family, hf, reader.chunks.values(), reader.objects)
    used = {piece.local for piece in pieces}
    return reader, pieces, faults + _not_floats({name: reader.chunks[name].dtype for name in sorted(used)})


def _expected(family: Architecture, hf: dict[str, Any], reader: SafetensorsReader) -> dict[str, tuple[int, ...]]:
    """Tensors and shapes of config.json, and a copy of a tied embedding if there is one and it is equal."""
    shapes = dict(family.tensors(hf))
    if HEAD not in shapes and {HEAD, EMBEDDING} <= reader.specs.keys():
        if reader.specs[HEAD] != reader.specs[EMBEDDING] or not torch.equal(
            *(reader[name].flatten().view(torch.uint8) for name in (HEAD, EMBEDDING))
        ):
            raise CheckpointError(
                f"{HEAD} is not {EMBEDDING}, but config.json has tie_word_embeddings: remove the tensor or untie them"
            )
        shapes[HEAD] = shapes[EMBEDDING]
    return shapes


def _not_floats(dtypes: Mapping[str, torch.dtype | str]) -> list[str]:
    known = ", ".join(sorted(str(d).removeprefix("torch.") for d in FLOATS))
    return [f"{n}: dtype {d}, expected one of {known}" for n, d in dtypes.items() if d not in FLOATS]
