"""Nothing of vLLM's own arithmetic is left in silence: built layers are ours, have run, and hold the right weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import Module
from vllm.config import CompilationMode
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from megatron_rlzero.architectures import architecture, read_config
from megatron_rlzero.architectures.layouts import engine_layout
from megatron_rlzero.resharding.transport import TRANSFORMS

#: classes of vLLM's layers that produce no value: containers
EXACT = frozenset(("LogitsProcessor", "Attention", "RoutedExperts", "MoERunner", "ApplyRotaryEmb"))
#: layers of ours that have been built and have not run yet
_waiting: WeakSet[Counted] = WeakSet()


class Counted:
    """Mixin of every layer of ours: it waits from its construction to its first run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.wait()

    def wait(self) -> None:
        """For a layer whose base classes are not built by ``__init__``."""
        _waiting.add(self)

    def used(self) -> None:
        """To be called where the layer computes."""
        _waiting.discard(self)


class Operator(Counted):
    """Mixin of vLLM's custom operators: one ``forward_native`` for all platforms, whatever is enabled."""

    def dispatch_forward(self, compile_native: bool) -> Callable[..., Any]:
        """See vLLM's CustomOp."""
        return self.forward_native


def check_classes(model: Module) -> None:
    """Every layer of vLLM's that computes has been replaced.

    Raises:
        RuntimeError: names the modules that have not.
    """
    stock = {}
    for name, module in model.named_modules():
        if isinstance(module, Attention) and not isinstance(module.impl, Counted):
            stock[name] = type(module.impl).__name__
        kind = type(module)
        if kind.__module__.startswith("vllm.model_executor.layers") and kind.__name__ not in EXACT:
            stock[name] = kind.__name__
    if stock:
        listed = ", ".join(f"{name} ({kind})" for name, kind in list(stock.items())[:5])
        raise RuntimeError(
            f"kernels = aligned: {len(stock)} layers are vLLM's own, such as {listed}; this model, or this vLLM, needs "
            "a layer of megatron_rlzero/invariance/vllm_layers.py that is missing; kernels = stock runs it"
        )


def check_used() -> None:
    """After a forward pass: every layer of ours that was built has run.

    Raises:
        RuntimeError: names the kinds that have not, since vLLM then ran something else in their place.
    """
    if _waiting:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in _waiting}))
        raise RuntimeError(f"kernels = aligned: {len(_waiting)} layers were built and passed by: {kinds}")


def check_parameters(model: Module, hf: dict[str, Any], read: Callable[[str], Tensor]) -> None:
    """Every parameter of this worker is what the table of its family says, to the bit.

    Args:
        hf: config.json of the checkpoint.
        read: Hugging Face name -> whole tensor; converted to the parameter's dtype here.

    Raises:
        RuntimeError: names the first parameter that the table lacks, or that differs, and the tensor.
    """
    family = architecture(hf)
    layout = engine_layout(family, hf, get_tensor_model_parallel_world_size())
    found = parameters(model)
    if unknown := found.keys() - family.engine_parameters(hf).keys():
        raise RuntimeError(f"the family {hf['model_type']} has no rule for the engine's parameter {min(unknown)}")
    for piece in layout[get_tensor_model_parallel_rank()]:
        if piece.local not in found:
            raise RuntimeError(f"the engine's model has no parameter {piece.local}, which the table of its family has")
        parameter = found[piece.local]
        expected = read(piece.tensor)[piece.box.slices].to(parameter.device)  # which has its own exponential
        if piece.transform is not None:
            expected = TRANSFORMS[piece.transform](expected)
        expected = expected.to(parameter)
        if not torch.equal(parameter[piece.local_box.slices], expected):
            raise RuntimeError(
                f"the engine's parameter {piece.local} differs from {piece.tensor}: it was loaded wrongly"
            )


def parameters(model: Module) -> dict[str, Tensor]:
    """Parameters by name; stacked experts one by one, with the expert's number in the whole model at the end.

    A tied output layer is the embedding, and not listed again.
    """
    result: dict[str, Tensor] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if ".experts." not in name:
                result[name] = parameter.data
                continue
            local = getattr(module, "_expert_map", None)
            numbers = range(len(parameter)) if local is None else (local >= 0).nonzero()[:, 0].tolist()
            result |= {f"{name}.{e}": parameter.data[i] for i, e in enumerate(numbers)}
    return result


def _reader(directory: Path) -> Callable[[str], Tensor]:
    files = [safe_open(file, "pt") for file in sorted(directory.glob("*.safetensors"))]
    where = {name: file for file in files for name in file.keys()}  # noqa: SIM118
    return lambda name: where[name].get_tensor(name)


def install() -> None:
    """Makes vLLM's loaders check each model that they return."""
    load = BaseModelLoader.load_model

    def load_model(self: BaseModelLoader, vllm_config: Any, model_config: Any, prefix: str = "") -> Module:
        mode = vllm_config.compilation_config.mode
        if mode != CompilationMode.NONE:
            raise RuntimeError(
                f"kernels = aligned: compilation would fuse its operators, mode is {mode}; it has to be 0"
            )
        model = load(self, vllm_config, model_config, prefix)
        check_classes(model)
        check_parameters(model, read_config(model_config.model), _reader(Path(model_config.model)))
        return model

    BaseModelLoader.load_model = load_model
