"""The dense decoder: every layer is attention, then a SwiGLU MLP. Families differ in what their attention has.

Hugging Face layer i is Megatron's layers 2i (attention) and 2i + 1 (MLP).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_rlzero.architectures import common
from megatron_rlzero.architectures.rules import Rule, Split, Stacked
from megatron_rlzero.architectures.trace import TracePoint


@dataclass(frozen=True)
class Dense:
    """The functions of ``Architecture`` for one kind of dense decoder.

    Attributes:
        qk_norm: an RMSNorm over every query head and every key head, before the rotary embedding.
        qkv_bias: biases on the query, key and value projections, and nowhere else.
    """

    qk_norm: bool
    qkv_bias: bool

    @property
    def _attention(self) -> dict[str, bool]:
        return {"qk_norm": self.qk_norm, "qkv_bias": self.qkv_bias}

    def transformer_config(self, hf: dict[str, Any]) -> dict[str, Any]:
        config = common.transformer_config(hf, **self._attention)
        return config | {"ffn_hidden_size": hf["intermediate_size"]}

    def layer_pattern(self, hf: dict[str, Any], stages: int) -> str:
        return common.layer_pattern(["*-"] * hf["num_hidden_layers"], stages)

    def parameters(self, hf: dict[str, Any], slices: int) -> dict[str, Rule]:
        hidden, width = hf["hidden_size"], hf["intermediate_size"]
        table = common.ends(hf, slices)
        for i in range(hf["num_hidden_layers"]):
            h, mlp = f"model.layers.{i}", f"decoder.layers.{2 * i + 1}.mlp"
            table |= common.attention(hf, 2 * i, f"{h}.self_attn", f"{h}.input_layernorm.weight", **self._attention) | {
                f"{mlp}.linear_fc1.layer_norm_weight": Split(f"{h}.post_attention_layernorm.weight", (hidden,)),
                f"{mlp}.linear_fc1.weight": Stacked(
                    (f"{h}.mlp.gate_proj.weight", f"{h}.mlp.up_proj.weight"), (width, hidden)
                ),
                f"{mlp}.linear_fc2.weight": Split(f"{h}.mlp.down_proj.weight", (hidden, width), 1),
            }
        return table

    def engine_parameters(self, hf: dict[str, Any]) -> dict[str, Rule]:
        hidden, width = hf["hidden_size"], hf["intermediate_size"]
        table = common.engine_ends(hf)
        for i in range(hf["num_hidden_layers"]):
            h = f"model.layers.{i}"
            a, mlp = f"{h}.self_attn", f"{h}.mlp"
            table |= (
                common.engine_norms(hf, h)
                | common.engine_attention(hf, a, a, **self._attention)
                | {
                    f"{mlp}.gate_up_proj.weight": Stacked(
                        (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"), (width, hidden)
                    ),
                    f"{mlp}.down_proj.weight": Split(f"{mlp}.down_proj.weight", (hidden, width), 1),
                }
            )
        return table

    def tensors(self, hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        return common.tensors(self.parameters(hf, slices=1))

    def trace_points(self, hf: dict[str, Any]) -> list[TracePoint]:
        """Every operator whose output both sides have, in the order of the forward pass."""
        points = []
        for i in range(hf["num_hidden_layers"]):
            h, mlp = f"model.layers.{i}", f"decoder.layers.{2 * i + 1}.mlp"
            points += [
                *common.trace_attention(hf, i, 2 * i, f"{h}.self_attn", qk_norm=self.qk_norm),
                TracePoint(f"layer {i}: norm and MLP", mlp, f"{h}.mlp"),
            ]
        return [*points, common.TRACE_END]
