"""The engine's parameter tables: what vLLM holds on each rank, for every family, tied and not."""

import numpy as np
import pytest

from megatron_rlzero.architectures import KNOWN, architecture, rules

SIZES = {
    "vocab_size": 300,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 3,
    "intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "rms_norm_eps": 1e-6,
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", KNOWN)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_all_ranks_together_hold_every_element(family, tied, tp):
    hf = SIZES | {"model_type": family, "tie_word_embeddings": tied}
    module = architecture(hf)
    held = {name: np.zeros(shape, dtype=bool) for name, shape in module.tensors(hf).items()}
    for name, rule in module.engine_parameters(hf).items():
        ranks = [(0, 1)] if ".experts." in name else [(rank, tp) for rank in range(tp)]
        for rank, size in ranks:
            for piece in rule.pieces(name, rank, size):
                assert piece.box.shape == piece.local_box.shape
                held[piece.tensor][piece.box.slices] = True
    assert [name for name, elements in held.items() if not elements.all()] == []
    assert any(name.endswith("lm_head.weight") for name in held) != tied


@pytest.mark.parametrize("family", KNOWN)
def test_the_learners_table_names_the_same_tensors(family):
    hf = SIZES | {"model_type": family}
    module = architecture(hf)
    named = lambda table: {p.tensor for rule in table.values() for p in rule.pieces("", 0, 1)}  # noqa: E731
    assert named(module.engine_parameters(hf)) == named(module.parameters(hf, 4)) == set(module.tensors(hf))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tensors_of_a_dense_checkpoint(family, tied):
    from transformers import AutoConfig, AutoModelForCausalLM

    hf = SIZES | {"model_type": family, "tie_word_embeddings": tied}
    settings = {k: v for k, v in hf.items() if k != "model_type" and "expert" not in k and not k.startswith("moe")}
    parameters = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).named_parameters()
    assert architecture(hf).tensors(hf) == {name: tuple(p.shape) for name, p in parameters}


@pytest.mark.parametrize(
    ("size", "rank", "wanted"),
    [
        (1, 0, [("q", 0, 24), ("k", 0, 6), ("v", 0, 6)]),
        (2, 1, [("q", 12, 24), ("k", 3, 6), ("v", 3, 6)]),
        (4, 1, [("q", 6, 12), ("k", 0, 3), ("v", 0, 3)]),  # two ranks share a KV head
        (4, 2, [("q", 12, 18), ("k", 3, 6), ("v", 3, 6)]),
    ],
)
def test_query_key_and_value_one_under_the_other(size, rank, wanted):
    rule = rules.QKV("q", "k", "v", heads=8, groups=2, head_dim=3, rest=(5,))
    pieces = list(rule.pieces("x", rank, size))
    assert [(p.tensor, p.box.start[0], p.box.stop[0]) for p in pieces] == wanted
    ends = [(p.local_box.start[0], p.local_box.stop[0]) for p in pieces]
    assert [a for a, _ in ends] == [0, *(b for _, b in ends[:-1])]
