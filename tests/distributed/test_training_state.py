"""Training state saved under one layout and loaded under another: the steps after it are those of an unbroken run."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rlzero.launch import launch
from tests.tiny import make_nemotron_h, make_qwen3_moe

TENSOR, PIPELINE, EXPERT = (f"{x}_model_parallel_size" for x in ("tensor", "pipeline", "expert"))
PP2, EP2 = {PIPELINE: 2}, {EXPERT: 2}
TP2, DP2 = {TENSOR: 2, EXPERT: 2}, {EXPERT: 1}
SHARDED = {"optimizer_use_distributed_optimizer": True}
#: layouts one after the other, each from the checkpoint of the one before: (layout, first update, last one + 1)
CHAINS = {
    "moved": [(TP2, 0, 2), (PP2 | SHARDED, 2, 4)],
    "sharded": [(TP2 | SHARDED, 0, 2), (EP2 | SHARDED, 2, 2), (DP2 | SHARDED, 2, 2), (PP2, 2, 4)],
}
MODELS = {"moe": make_qwen3_moe, "hybrid": make_nemotron_h}
MORE = [("moe", "bf16"), ("moe", "fp32"), ("hybrid", "fp32")]


def cases() -> list[dict]:
    found = [{"name": "unbroken", "first": 0, "stop": 4, **PP2}]
    found += [{"name": "half", "first": 0, "stop": 2, **PP2}, {"name": "forgetful", "first": 2, "stop": 4, **PP2}]
    for chain, links in CHAINS.items():
        for i, (layout, first, stop) in enumerate(links):
            case = {"name": f"{chain}{i}", "first": first, "stop": stop, **layout, "save": f"{chain}{i}.state"}
            found.append(case | ({"load": f"{chain}{i - 1}.state"} if i else {}))
    return found


def run(out: Path, model: Path, cases: list[dict]) -> None:
    plan = out / "plan.json"
    plan.write_text(json.dumps({"model": str(model), "out": str(out), "cases": cases}))
    assert launch(["-m", "tests.distributed.state_ranks", str(plan)], 2) == 0


def same(out: Path, one: str, other: str) -> bool:
    a, b = load_file(out / f"{one}.safetensors"), load_file(out / f"{other}.safetensors")
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("hybrid", "bf16"), *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)],
)
def test_another_layout_goes_on_to_the_bit(tmp_path, kind, dtype):
    model = MODELS[kind](tmp_path / "model")
    settings = {"dtype": dtype, "max_tokens_per_microbatch": 64, "optimizer_lr_warmup_updates": 8}
    other = make_qwen3_moe(tmp_path / "other", num_hidden_layers=3)
    wrong = {"name": "wrong", "first": 0, "stop": 0, "model": str(other), "load": "moved0.state"} | TP2
    odd = {"name": "odd", "first": 0, "stop": 0, "load": "moved0.state", "refuses": True} | TP2 | SHARDED
    run(tmp_path, model, [case | settings for case in [*cases(), wrong, odd]])
    for chain, links in CHAINS.items():
        assert same(tmp_path, f"{chain}{len(links) - 1}", "unbroken")
        assert same(tmp_path, f"{chain}0", "half")
    assert not same(tmp_path, "half", "unbroken")
    rates = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("unbroken", "moved1", "forgetful")]
    assert rates[0][2:] == rates[1] != rates[2]
    for rank in range(2):
        assert "holds another model" in (tmp_path / f"wrong-{rank}.txt").read_text()
        found = json.loads((tmp_path / f"odd-{rank}.json").read_text())
        assert found["empty"] == [False, 0.0, 0.0, True]
        for name in ("overflow", "nan"):
            message, untouched = found[name]
            assert "response 5 of the batch has log pi" in message and untouched
        assert found["control"] is False
