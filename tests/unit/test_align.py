"""What alignment keeps: gates that close when something changes, whole files, the profile that is accepted."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rlzero import arguments
from megatron_rlzero.align import documents, ledger, profile, proxy
from megatron_rlzero.align.causes import UNKNOWN, causes
from megatron_rlzero.align.ledger import Ledger, Outcome
from megatron_rlzero.align.reference import Adam, Float64
from megatron_rlzero.align.watch import Clock, Watch
from megatron_rlzero.architectures import architecture
from megatron_rlzero.config import Config
from megatron_rlzero.kernels.norm import rms_norm
from megatron_rlzero.validation import validate
from tests.tiny import make_qwen3_moe

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def test_the_command_has_every_step():
    assert ("all", *ledger.STEPS, ledger.ACCEPT) == arguments.ALIGN_STEPS


def test_a_gate_is_of_the_files_as_they_were(tmp_path, model):
    kept = Ledger(tmp_path / "out", model, "")
    assert kept.next() == "proxy"
    kept.add("proxy", Outcome(True), kept.fingerprint(), 1.0)
    kept.add("map", Outcome(True, ["all ours"], {"Modules": [["module"], ["a"]]}), kept.fingerprint(), 1.0)
    again = Ledger(tmp_path / "out", model, "")
    assert again.passed("map") and again.next() == "measure"
    assert "| Prepare the reference | map |" in (tmp_path / "out" / "alignment.md").read_text()
    (model / "config.json").write_text('{"hidden_size": 2}')
    assert not again.passed("map")
    assert "yes (of other files or code)" in again.report()
    with pytest.raises(ValueError, match="choose another directory"):
        Ledger(tmp_path / "out", tmp_path, "")


def test_a_family_of_its_own_counts(tmp_path, model):
    family = tmp_path / "family.py"
    family.write_text("A = 1\n")
    kept = Ledger(tmp_path / "out", model, str(family))
    kept.add("map", Outcome(True), kept.fingerprint(), 1.0)
    family.write_text("A = 2\n")
    assert not kept.passed("map")


def test_a_profile_is_accepted_with_the_numerical_gates(tmp_path, model):
    kept = Ledger(tmp_path / "out", model, "")
    kept.add("profile", Outcome(True, values={"ratios": {"engine": 2.0}}), kept.fingerprint(), 1.0)
    kept.add("check", Outcome(True), kept.fingerprint(), 1.0)
    kept.add("gradcheck", Outcome(False), kept.fingerprint(), 1.0)
    with pytest.raises(ValueError, match="gradcheck not passed"):
        kept.accept()
    kept.add("gradcheck", Outcome(True), kept.fingerprint(), 1.0)
    assert kept.accept() == {"ratios": {"engine": 2.0}}
    assert Ledger(tmp_path / "out", model, "").accepted == {"ratios": {"engine": 2.0}}
    assert json.loads((tmp_path / "out" / "alignment.json").read_text())["steps"]["check"]["passed"]


class Half(torch.nn.Module):
    """Our norm, then a product and a sum from elsewhere."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = Ours(), torch.nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(self.norm(x))


class Ours(torch.nn.Module):
    def forward(self, x):
        return rms_norm(x, torch.ones(8), 1e-6)


def test_what_computes_is_seen():
    model, x = Half(), torch.randn(3, 8)
    watch = Watch(model)
    model(x)
    watch.close()
    found = watch.found()
    assert "norm" in found["norm"]["operators"] and not found["norm"]["foreign"]
    assert list(found["linear"]["foreign"]) == ["aten::addmm"] and not found["linear"]["operators"]
    assert list(found[""]["elementwise"]) == ["aten::add.Tensor"] and not found[""]["foreign"]
    assert (found["norm"]["shape"], found["norm"]["dtype"]) == ((3, 8), "float32")
    model(x)
    assert watch.found() == found  # closed


def test_time_is_of_the_innermost_module():
    model = Half()
    clock = Clock(model)
    model(torch.randn(3, 8))
    clock.close()
    assert clock.found().keys() == {"", "norm", "linear"} and min(clock.found().values()) > 0
    assert profile.kinds({"layers.0.a": 1.0, "layers.11.a": 2.0, "b": 4.0}) == {"layers.*.a": 3.0, "b": 4.0}


def test_code_that_asks_for_float32_gets_float64():
    x = torch.randn(3, dtype=torch.float64)
    with Float64():
        found = (x.float(), x.to(torch.float32), x.softmax(0, dtype=torch.float32), torch.zeros(1, dtype=torch.float32))
    assert {y.dtype for y in found} == {torch.float64} and torch.equal(found[0], x)
    assert x.float().dtype == torch.float32


def test_adam_is_torchs():
    weight, bias = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    given = {"weight": weight.clone().requires_grad_(), "bias": bias.clone().requires_grad_()}
    groups = [{"params": [given["weight"]], "weight_decay": 0.3}, {"params": [given["bias"]], "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-5)
    mine, weights = Adam(0.9, 0.95, 1e-5, 0.3), {"weight": weight, "bias": bias}
    for _ in range(3):
        gradients = {name: torch.randn_like(w) for name, w in weights.items()}
        for name, parameter in given.items():
            parameter.grad = gradients[name]
        theirs.step()
        weights = mine.step(weights, gradients, 1e-2)
    assert all(torch.allclose(weights[name], given[name].detach(), rtol=1e-12, atol=0) for name in given)


@pytest.mark.parametrize("positions", [40, 200, 4096])
def test_prompts_fit_the_model(positions):
    prompts = documents.prompts(97, positions)
    assert max(map(len, prompts)) + documents.NEW < positions and max(map(max, prompts)) < 97
    drawn = documents.responses(97, positions)
    assert all(len(r.tokens) <= positions for r in drawn.rollouts) and {
        r.action_mask.any() for r in drawn.rollouts
    } == {True, False}


def test_every_operator_of_a_family_has_causes():
    from megatron_rlzero.architectures import architecture
    from tests.tiny import HYBRID, SIZES

    hybrid = HYBRID | {"model_type": "nemotron_h", "hybrid_override_pattern": "ME*M-E"}
    moe = SIZES | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    for hf in (hybrid, moe):
        assert all(causes(point.name) != UNKNOWN for point in architecture(hf).trace_points(hf))
    assert causes("something else") == UNKNOWN


def neighbours(pattern):
    return {pattern[i : i + 2] for i in range(len(pattern) - 1)}


@pytest.mark.parametrize("example", ["qwen3_30b_a3b", "nemotron_omni"])
def test_a_proxy_keeps_the_computation_of_a_published_model(tmp_path, example):
    hf = json.loads((EXAMPLES / example / "config.json").read_text())
    config = Config()
    config.model.path = str(EXAMPLES / example)
    found = proxy.proxy(config, tmp_path)
    assert found.passed, found.lines
    small = json.loads((tmp_path / "model" / "config.json").read_text())
    changed = {name for name in hf if small[name] != hf[name]}
    assert changed == found.values["reduced"].keys()
    counts = {"hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"}
    counts |= {"max_position_embeddings", "intermediate_size", "moe_intermediate_size", "bos_token_id", "eos_token_id"}
    counts |= {"num_experts", "n_routed_experts", "moe_shared_expert_intermediate_size", "n_groups", "mamba_num_heads"}
    assert changed <= counts | {"hybrid_override_pattern"}
    ratio = lambda c: c["num_attention_heads"] / c["num_key_value_heads"]  # noqa: E731
    assert ratio(small) == ratio(hf)
    if "hybrid_override_pattern" in hf:
        whole, part = hf["hybrid_override_pattern"], small["hybrid_override_pattern"]
        assert part in whole
        assert neighbours(part) == neighbours(whole)
    config.model.path, config.model.dtype = found.values["model"], "bf16"
    learner = config.learner
    learner.world_size = learner.tensor_model_parallel_size = learner.expert_model_parallel_size = 2
    faults = validate(config, starting=False, weights=False)
    assert [fault for fault in faults if fault.startswith(("model", "learner", "reduction"))] == []
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    assert {n: tuple(t.shape) for n, t in tensors.items()} == architecture(small).tensors(small)


def test_a_small_model_is_its_own_proxy(tmp_path):
    config = Config()
    config.model.path = str(make_qwen3_moe(tmp_path / "model"))
    found = proxy.proxy(config, tmp_path / "out")
    assert found.passed and found.values == {"model": config.model.path} and not (tmp_path / "out").exists()
