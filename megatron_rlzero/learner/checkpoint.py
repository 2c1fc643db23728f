"""The learner's training state on disk: boxes of fp32 tensors under Hugging Face names, which any layout can load.

Megatron-Core's dist_checkpointing would do for some of its optimizers only: it has no place for the fp32 parameters of
a bf16 model, nor for the step of torch's Adam under the distributed optimizer, and its index is a pickle.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Parameter

from megatron_rlzero.resharding.directories import CheckpointError
from megatron_rlzero.resharding.layout import Box, Layout, Piece, whole_tensors
from megatron_rlzero.resharding.plan import Transfer, plan
from megatron_rlzero.resharding.safetensors_files import SafetensorsReader

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

    from megatron_rlzero.learner.build import Parts
    from megatron_rlzero.learner.weights import Weights

#: the fp32 parameter that the optimizer steps, or a buffer; then Adam's two moments
MAIN, MOMENTS = "main", ("exp_avg", "exp_avg_sq")
STEPS = "steps.json"


@dataclass
class _Held:
    """A parameter's state on this rank: elements ``start`` to ``stop`` of the flattened local tensor.

    ``main`` is the key of the state in ``inner``, torch's or TransformerEngine's optimizer.
    """

    main: Tensor
    inner: torch.optim.Optimizer
    start: int
    stop: int


class TrainingState:
    """Weights, moments and number of steps of one rank's optimizer; every method is collective.

    There is no random state in it: the learner draws nothing, and the sampler's noise is a function of its keys.
    """

    def __init__(self, parts: Parts, weights: Weights) -> None:
        self.parts, self.weights = parts, weights
        names = {id(tensor): name for name, tensor in weights.local.items()}
        parameters = [tensor for tensor in weights.local.values() if isinstance(tensor, Parameter)]
        optimizers = getattr(parts.optimizer, "chained_optimizers", [parts.optimizer])
        self.held = {names[id(p)]: held for optimizer in optimizers for p, held in _held(optimizer, parameters)}

    def save(self, directory: str | Path) -> None:
        """Writes this rank's share into ``directory``, which every rank sees; each element is in one file."""
        rank, steps = dist.get_rank(), self.parts.scheduler.num_steps
        transfers = plan(self._stored(), {-1: whole_tensors(self.weights.shapes)})
        tensors: dict[str, Tensor] = {}
        for local, mine in _by_local([t for t in transfers if t.source == rank], "source_local").items():
            for kind, values in self._values(local, steps):
                for t in mine:
                    tensors[_key(kind, t.tensor, t.box)] = values[t.source_box.slices].cpu().clone()
        save_file(tensors, Path(directory, f"rank-{rank:05d}.safetensors"))
        if rank == 0:
            Path(directory, STEPS).write_text(json.dumps({"steps": steps}) + "\n")
        dist.barrier()

    def load(self, directory: str | Path) -> None:
        """Brings model, optimizer and learning-rate schedule to what ``save`` wrote under this or another layout.

        Raises:
            CheckpointError: a file is damaged, or holds another model; names the tensors.
        """
        steps = json.loads(Path(directory, STEPS).read_text())["steps"]
        reader = SafetensorsReader(directory)
        stored: dict[str, list[Piece]] = {}
        for key, spec in reader.specs.items():
            kind, tensor, start = key.split("/")
            corner = tuple(int(x) for x in start.split(","))
            stop = tuple(a + n for a, n in zip(corner, spec.shape, strict=True))
            stored.setdefault(kind, []).append(Piece(tensor, Box(corner, stop), key, Box.whole(spec.shape)))
        if different := {p.tensor for p in stored.get(MAIN, ())} ^ self.weights.shapes.keys():
            raise CheckpointError(f"{directory} holds another model: {sorted(different)[:5]} are in one of them only")
        rank = dist.get_rank()
        for kind in (MAIN, *MOMENTS) if steps else (MAIN,):
            wanted = self.weights.layout[rank] if kind == MAIN else self.weights.trained[rank]
            try:
                transfers = plan({0: stored.get(kind, [])}, {0: wanted})
            except ValueError as error:
                raise CheckpointError(f"{directory}, {kind}: {error}") from None
            parts = _by_local(transfers, "target_local")
            for local in self.weights.local if kind == MAIN else self.held:
                whole = torch.zeros(self.weights.local[local].shape)  # rows of padding are in no piece
                for t in parts.get(local, ()):
                    whole[t.target_box.slices] = reader[t.source_local][t.source_box.slices]
                self._set(local, kind, whole, steps)
        self.parts.scheduler.step(increment=steps - self.parts.scheduler.num_steps)
        dist.barrier()

    def _stored(self) -> Layout:
        """Rank -> the pieces whose state lies there; with the distributed optimizer a rank has parts of them."""
        rank = dist.get_rank()
        trained = {piece.local for piece in self.weights.trained[rank]}
        mine = [part for piece in self.weights.layout[rank] for part in self._parts(piece, piece.local in trained)]
        texts = _all_gather(json.dumps([[p.tensor, p.box.start, p.box.stop] for p in mine]))
        boxes = [[(tensor, Box(tuple(a), tuple(b))) for tensor, a, b in json.loads(text)] for text in texts]
        # Where a piece lies in another rank's memory is that rank's affair.
        return {r: [Piece(t, box, "", box) for t, box in boxes[r]] if r != rank else mine for r in range(len(boxes))}

    def _parts(self, piece: Piece, trained: bool) -> Iterator[Piece]:
        """What this rank has of a piece: all of a buffer, of a parameter what its optimizer steps here."""
        if not trained:
            yield piece
        elif (held := self.held.get(piece.local)) is not None:
            for box in boxes_of_range(tuple(self.weights.local[piece.local].shape), held.start, held.stop):
                if (common := box.intersect(piece.local_box)) is not None:
                    offset = (a - b for a, b in zip(piece.box.start, piece.local_box.start, strict=True))
                    yield piece._replace(box=common.shift(offset), local_box=common)

    def _values(self, local: str, steps: int) -> Iterator[tuple[str, Tensor]]:
        """Kind and fp32 values in the local tensor's shape, NaN where another rank has them."""
        tensor = self.weights.local[local].detach()
        if local not in self.held:
            yield MAIN, tensor.float()
            return
        held = self.held[local]
        moments = {kind: held.inner.state[held.main][kind] for kind in MOMENTS} if steps else {}
        for kind, part in {MAIN: held.main.detach(), **moments}.items():
            whole = torch.full(tensor.shape, torch.nan)
            whole.view(-1)[held.start : held.stop] = part.flatten()
            yield kind, whole

    def _set(self, local: str, kind: str, whole: Tensor, steps: int) -> None:
        if kind == MAIN:
            with torch.no_grad():
                self.weights.local[local].copy_(whole)  # rounds as the optimizer does after a step
        if (held := self.held.get(local)) is None:
            return
        part = whole.flatten()[held.start : held.stop].view(held.main.shape).to(held.main.device)
        state = held.inner.state[held.main]
        if kind == MAIN:
            held.main.data.copy_(part)
            if steps and isinstance(held.inner, torch.optim.Adam):
                state["step"] = torch.tensor(float(steps))
            elif steps:
                for group in held.inner.param_groups:
                    group["step"] = steps  # where the fused optimizers count
        else:
            state[kind] = part.clone()


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Disjoint boxes that cover the elements ``start`` to ``stop`` of the flattened tensor, in their order."""
    row = Box.whole(shape[1:]).numel
    zeros = tuple(0 for _ in shape[1:])
    while start < stop:
        first, inside = divmod(start, row)
        whole = (stop - start) // row
        if inside == 0 and whole:
            yield Box((first, *zeros), (first + whole, *shape[1:]))
            start += whole * row
        else:
            end = min(stop - first * row, row)
            for box in boxes_of_range(shape[1:], inside, end):
                yield Box((first, *box.start), (first + 1, *box.stop))
            start = first * row + end


def _held(optimizer: MegatronOptimizer, parameters: Iterable[Parameter]) -> Iterator[tuple[Parameter, _Held]]:
    """Those of the model's parameters that this optimizer steps, at least in part, and what it has of each."""
    inner = optimizer.optimizer
    if isinstance(optimizer, DistributedOptimizer):
        models = chain(*optimizer.model_fp32_groups, *optimizer.model_float16_groups)
        mains = chain(*optimizer.shard_fp32_groups, *optimizer.shard_fp32_from_float16_groups)
        for parameter, main in zip(models, mains, strict=True):
            part = optimizer._get_model_param_range_map(parameter)["param"]
            yield parameter, _Held(main, inner, part.start, part.end)
        return
    stepped = {id(main) for group in inner.param_groups for main in group["params"]}
    for parameter in parameters:
        main = getattr(parameter, "main_param", parameter)  # an fp32 copy, where the parameter is not fp32
        if id(main) in stepped:
            yield parameter, _Held(main, inner, 0, main.numel())


def _by_local(transfers: list[Transfer], name: str) -> dict[str, list[Transfer]]:
    grouped: dict[str, list[Transfer]] = {}
    for transfer in transfers:
        grouped.setdefault(getattr(transfer, name), []).append(transfer)
    return grouped


def _key(kind: str, tensor: str, box: Box) -> str:
    return f"{kind}/{tensor}/{','.join(map(str, box.start))}"


def _all_gather(text: str) -> list[str]:
    """Every rank's text, on every rank."""
    mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(mine)]))
    longest = int(max(sizes))
    found = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(found, torch.nn.functional.pad(mine, (0, longest - len(mine))))
    return [bytes(t[: int(n)].numpy()).decode() for t, n in zip(found, sizes, strict=True)]
