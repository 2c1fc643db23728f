"""Faults, one at a time on the learner's side: each is found, and named at the right layer and operator."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rlzero.align import documents, gradcheck, reference
from megatron_rlzero.align.check import first_difference
from megatron_rlzero.align.job import run_engine, run_learner
from megatron_rlzero.align.ties import with_ties
from megatron_rlzero.architectures import architecture, in_transformers, read_config
from tests.tiny import learner_config, make_nemotron_h, make_qwen3_moe

pytestmark = pytest.mark.full

#: fault -> model, weights, and where it is first seen
FORWARD = {
    "": ("moe", "moe", ""),
    "rotary_base": ("moe", "moe", "layer 0: attention"),
    "norm_epsilon": ("moe", "moe", "layer 0: norm and query, key, value projection"),
    "gate_in_bf16": ("moe", "moe", "layer 0: router choice"),
    "ties_to_the_highest": ("moe", "ties", "layer 0: router choice"),
    "residual_rounded": ("moe", "moe", "layer 0: residual and norm after attention"),
    "slices": ("moe", "moe", "layer 0: output projection"),
    "experts_transposed": ("moe", "moe", "layer 0: experts"),
    "routed_scaling": ("hybrid", "hybrid", "layer 1: experts"),
    "gate_after_the_norm": ("hybrid", "hybrid", "layer 0: convolution, scan and gated norm"),
    "no_bound_of_the_time_step": ("hybrid", "hybrid", "layer 0: convolution, scan and gated norm"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {"moe": make_qwen3_moe(root / "moe"), "hybrid": make_nemotron_h(root / "hybrid")}
    return made | {"ties": with_ties(made["moe"], root / "ties", read_config(made["moe"]))}


@pytest.fixture(scope="module")
def out(models, tmp_path_factory) -> Path:
    """The engine's traces without a fault, the learner's with each."""
    out = tmp_path_factory.mktemp("out")
    config = learner_config(models["moe"], out, world_size=1)
    prompts = documents.prompts(100, 512)[3:6]
    common = {"kind": "trace", "prompts": prompts, "new": 1, "length": 200}
    tasks = [common | {"name": n, "settings": {"model.path": str(p)}} for n, p in models.items()]
    run_engine(config, out, tasks)
    tasks = []
    for fault, (_, weights, _) in FORWARD.items():
        settings = {"model.path": str(models[weights])} | ({"reduction_slices": 2} if fault == "slices" else {})
        task = common | {"name": f"fault-{fault}", "settings": settings}
        tasks.append(task | ({"fault": fault} if fault not in ("", "slices") else {}))
    tasks.append(common | {"kind": "map", "name": "map", "fault": "stock_norm"})
    for fault in ("", "backward_halved", "decay_of_norms"):
        optimizer = {f"learner.optimizer.{n}": v for n, v in gradcheck.OPTIMIZER.items()}
        task = {"kind": "steps", "steps": 2, "name": f"steps-{fault}", "settings": optimizer}
        tasks.append(task | ({"fault": fault} if fault else {}))
    run_learner(config, out, tasks, "tests.align.planted")
    return out


@pytest.mark.parametrize("fault", FORWARD)
def test_faults_of_the_forward_pass_are_named(models, out, fault):
    model, weights, where = FORWARD[fault]
    hf = read_config(models[model])
    names = [point.name for point in architecture(hf).trace_points(hf)]
    (out / f"engine-fault-{fault}.safetensors").write_bytes((out / f"engine-{weights}.safetensors").read_bytes())
    found = first_difference(out, f"fault-{fault}", names)
    assert (found[0] if found else "") == where


def test_a_stock_kernel_on_the_value_path_is_named(out):
    modules = json.loads((out / "learner-map.json").read_text())
    foreign = {name: seen["foreign"] for name, seen in modules.items() if seen["foreign"]}
    assert {"decoder.layers.1.pre_mlp_layernorm", "decoder.final_norm"} <= foreign.keys()
    assert all("norm" in name or name.endswith("linear_qkv") for name in foreign)
    assert {op for ops in foreign.values() for op in ops} == {"aten::mean.dim"}


def test_a_backward_of_a_wrong_scale_is_named_where_it_begins(models, out):
    hf, drawn = read_config(models["moe"]), documents.responses(100, 512)
    loss, gradients = reference.gradients(
        in_transformers.load(models["moe"], torch.float64), drawn.rollouts, drawn.advantages
    )
    depth = gradcheck.depths(hf)
    right, wrong = (load_file(out / f"learner-steps-{fault}.safetensors") for fault in ("", "backward_halved"))
    assert gradcheck.gradient_faults(right, loss, gradients, depth)[0] == []
    lines, _ = gradcheck.gradient_faults(wrong, loss, gradients, depth)
    assert any("that of model.layers.1.self_attn.q" in line for line in lines), lines


def test_weight_decay_of_the_wrong_tensors_is_named(out):
    right, wrong = (load_file(out / f"learner-steps-{fault}.safetensors") for fault in ("", "decay_of_norms"))
    assert gradcheck.optimizer_faults(right) == []
    lines = gradcheck.optimizer_faults(wrong)
    named = {name for line in lines if line.startswith("all that it does") for name in line.split(": ")[1].split(", ")}
    assert named == {n.removeprefix("grad.0.") for n, g in right.items() if n.startswith("grad.0.") and g.dim() == 1}


def test_the_reference_is_the_oracle(models):
    """transformers in float64, with its casts to float32 taken out, against plain torch."""
    from tests import oracle

    for name in ("moe", "hybrid"):
        hf, drawn = read_config(models[name]), documents.responses(100, 512)
        weights = {k: v.double().requires_grad_() for k, v in load_file(models[name] / "model.safetensors").items()}
        given = [
            {
                "tokens": torch.from_numpy(r.tokens).long(),
                "action": torch.from_numpy(r.action_mask),
                "log_mu": torch.from_numpy(r.logprobs).double(),
                "advantage": float(a),
            }
            for r, a in zip(drawn.rollouts, drawn.advantages, strict=True)
        ]
        objective = oracle.objective(hf, weights, given)
        wanted = torch.autograd.grad(objective, list(weights.values()), allow_unused=True, materialize_grads=True)
        loss, found = reference.gradients(
            in_transformers.load(models[name], torch.float64), drawn.rollouts, drawn.advantages
        )
        assert loss == pytest.approx(float(objective), rel=1e-6)
        trained = {n: g for n, g in zip(weights, wanted, strict=True) if not n.endswith(architecture(hf).BUFFERS)}
        assert max(gradcheck.error(found[n], g) for n, g in trained.items()) < 1e-6
