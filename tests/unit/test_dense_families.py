"""The dense families: parameter tables, settings that are refused by name, rotary settings, pipeline cuts."""

import pytest

from megatron_rlzero.architectures import common, llama, qwen2, qwen3, qwen3_moe
from tests.unit.test_architectures import HF, SLICES, assert_held_once

#: three layers, a vocabulary that nothing divides
DENSE = {
    "vocab_size": 301,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 3,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
WITH_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", [llama, qwen2, qwen3])
def test_every_element_of_a_dense_model_is_held_once_per_replica(family, tied, tp):
    assert_held_once(family, DENSE | {"tie_word_embeddings": tied}, tp)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_biases_lie_as_the_rows_of_their_weights(tp):
    table = qwen2.parameters(DENSE, SLICES)
    names = [n for n in table if n.endswith(".bias")]
    assert names == [f"decoder.layers.{2 * i}.self_attention.linear_qkv.bias" for i in range(3)]
    for name in names:
        for rank in range(tp):
            weights, biases = (
                [
                    (p.tensor.removesuffix(kind), p.box.start[:1], p.box.stop[:1], p.local_box.start[:1])
                    for p in table[name.replace("bias", kind)].pieces("x", rank, tp)
                ]
                for kind in ("weight", "bias")
            )
            assert weights == biases
    engine = qwen2.engine_parameters(DENSE)
    assert [n for n in engine if n.endswith(".bias")] == [f"model.layers.{i}.self_attn.qkv_proj.bias" for i in range(3)]
    for family in (llama, qwen3, qwen3_moe):
        assert not any(n.endswith("bias") for n in family.tensors(DENSE | HF))


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        (llama, {"mlp_bias": True}, "mlp_bias = True"),
        (llama, {"attention_bias": True}, "attention_bias = True"),
        (llama, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
        (llama, {"rope_scaling": WITH_LLAMA3 | {"factor": None}}, "factor = None in llama3 scaling"),
        (llama, {"rope_parameters": WITH_LLAMA3 | {"high_freq_factor": 1}}, "low_freq_factor = 1: only one below"),
        (llama, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        (llama, {"is_causal": False}, "is_causal = False"),
        (qwen2, {"use_sliding_window": True}, "use_sliding_window = True"),
        (qwen2, {"layer_types": ["sliding_attention"] * 3}, "layer_types = sliding_attention"),
        (qwen2, {"head_dim": 6}, "head_dim = 6: only hidden_size / num_attention_heads = 24 / 8"),
        (qwen2, {"num_key_value_heads": None}, "num_key_value_heads = None"),
        (qwen2, {"qk_norm": True}, "qk_norm = True"),
        (qwen2, {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config = "),
        (qwen3, {"head_dim": None}, "head_dim = None"),
        (qwen3, {"attention_bias": True}, "attention_bias = True"),
    ],
)
def test_settings_of_dense_families(family, changes, named):
    assert family.unsupported(DENSE) == family.unsupported(DENSE | {"rope_parameters": WITH_LLAMA3}) == []
    (fault,) = family.unsupported(DENSE | changes)
    assert fault.startswith(named) and fault.endswith("is supported")


def test_settings_that_may_be_left_out():
    hf = {k: v for k, v in DENSE.items() if k not in ("head_dim", "num_key_value_heads")}
    assert llama.unsupported(hf) == []
    assert llama.tensors(hf) == llama.tensors(DENSE | {"num_key_value_heads": 8})
    config = llama.transformer_config(hf)
    assert (config["kv_channels"], config["num_query_groups"], config["num_layers"]) == (3, 8, 6)
    assert not config["add_qkv_bias"] and not config["qk_layernorm"]
    config = qwen2.transformer_config(DENSE)
    assert config["add_qkv_bias"] and not config["qk_layernorm"]
    config = qwen3.transformer_config(DENSE)
    assert not config["add_qkv_bias"] and config["qk_layernorm"]


def test_rotary_settings():
    assert llama.rotary({}) == {"base": 1e4}  # as transformers and the engine have it
    assert llama.rotary({"rope_theta": 1e6, "rope_scaling": None}) == {"base": 1e6}
    assert llama.rotary({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}) == {"base": 5e5}
    scaled = {"base": 5e5, "scaling": (8.0, 1.0, 4.0, 8192.0)}
    assert llama.rotary({"rope_parameters": WITH_LLAMA3}) == scaled
    old = {k: v for k, v in WITH_LLAMA3.items() if k != "rope_theta"}
    assert llama.rotary({"rope_theta": 5e5, "rope_scaling": old}) == scaled


@pytest.mark.parametrize(
    ("layers", "stages", "cut"),
    [(3, 2, [2, 1]), (5, 2, [3, 2]), (5, 3, [2, 2, 1]), (7, 4, [2, 2, 2, 1]), (6, 3, [2, 2, 2]), (4, 4, [1] * 4)],
)
def test_pipeline_cuts(layers, stages, cut):
    assert [len(stage) // 2 for stage in common.layer_pattern(["*-"] * layers, stages).split("|")] == cut
    # stage s begins at layer ceil(s L / n)
    first = [-(-s * layers // stages) for s in range(stages)]
    assert [sum(cut[:s]) for s in range(stages)] == first


def test_every_pipeline_stage_has_a_layer():
    for layers in range(1, 9):
        for stages in range(1, layers + 1):
            parts = common.layer_pattern(["*E"] * layers, stages).split("|")
            assert len(parts) == stages and all(parts) and "".join(parts) == "*E" * layers
    with pytest.raises(ValueError, match=r"^3 layers cannot be cut into 4 pipeline stages"):
        qwen2.layer_pattern(DENSE, 4)
