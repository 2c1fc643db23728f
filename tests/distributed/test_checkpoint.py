"""Converted checkpoints under Megatron-Core's own load, its own checkpoints under ours, one layout under another."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rlzero.architectures.checkpoint_layout import smallest_world
from megatron_rlzero.convert import to_hf, to_megatron
from megatron_rlzero.launch import launch
from tests.checkpoints import config, read, same_bits, write
from tests.omni import make_omni

MODELS = {
    "moe": config("qwen3_moe", hidden_size=64, head_dim=16),
    "qwen2": config("qwen2", hidden_size=64, head_dim=16, tie_word_embeddings=True),
    "hybrid": config("nemotron_h", hidden_size=64, head_dim=16, hybrid_override_pattern="M*-EMEM"),
}
#: of which Megatron has a GPTModel
GPT = [name for name in MODELS if name != "hybrid"]
#: how GPTModel may number layers and experts: on axes, layers in the key, both in the key
FORMS = {
    "homogeneous": {},
    "numbered": {"non_homogeneous_layers": True},
    "singleton": {"singleton_local_shards": True},
}
TENSOR, PIPELINE, EXPERT = (f"{x}_model_parallel_size" for x in ("tensor", "pipeline", "expert"))
#: ranks -> layout that saves, layout that loads
LAYOUTS = {
    2: ({TENSOR: 2, EXPERT: 2}, {PIPELINE: 2}),
    4: ({TENSOR: 2, PIPELINE: 2, EXPERT: 2}, {EXPERT: 2}),  # two ranks hold each expert
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    models = {name: write(root / name, hf) for name, hf in MODELS.items()}
    return models | {"omni": make_omni(root / "omni", models["hybrid"], dtype=torch.float32)}


def run(world: int, steps: list[dict], out: Path) -> None:
    path = out / f"steps{world}.json"
    path.write_text(json.dumps(steps, default=str))
    assert launch(["-m", "tests.distributed.checkpoint_ranks", str(path)], world) == 0


def sizes_of_eight(name: str):
    return smallest_world(4, 2, 1, 1) if name == "qwen2" else smallest_world(2, 2, 2, 1)


@pytest.fixture(scope="module")
def one(models, tmp_path_factory) -> Path:
    """One rank loads what ``convert`` wrote for many, and saves."""
    out = tmp_path_factory.mktemp("one")
    steps = []
    for name in MODELS:
        model = models[name]
        for naming, kind in (("hybrid", "learner"), ("gpt", "stock"))[: 1 + (name in GPT)]:
            source = out / f"{name}_{naming}"
            to_megatron(model, source, sizes_of_eight(name), naming)
            common = {"kind": kind, "model": model, "from": source}
            if kind == "learner":
                steps.append(common | {"assemble": f"{name}.safetensors", "states": f"{name}.states.json"})
            for form, metadata in FORMS.items():
                saved = f"{name}_{form}_{kind}"
                steps.append(common | {"to": out / saved, "metadata": metadata})
                if name == "moe" and form != "homogeneous":
                    steps[-1]["entries"] = saved
    run(1, steps, out)
    return out


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def many(request, models, one, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("many")
    steps = []
    for name in MODELS:
        model = models[name]
        save, load = (
            {EXPERT: 1} | {k: v for k, v in layout.items() if name != "qwen2" or k != EXPERT}
            for layout in LAYOUTS[request.param]
        )
        common = {"kind": "learner", "model": model}
        steps += [
            common | {"sizes": save, "from": "hf", "to": out / f"{name}_saved"},
            common | {"sizes": load, "from": out / f"{name}_saved", "assemble": f"{name}_own.safetensors"},
            common | {"sizes": save, "from": one / f"{name}_hybrid", "assemble": f"{name}_converted.safetensors"},
        ]
    save = {"sizes": LAYOUTS[request.param][0], "from": "hf", "to": out / "omni_saved", "export": out / "omni"}
    steps.append({"kind": "learner", "model": models["omni"]} | save)
    sizes = {TENSOR: request.param, EXPERT: 1}
    steps.append({"kind": "mixers", "model": models["hybrid"], "sizes": sizes, "entries": "mixers"})
    run(request.param, steps, out)
    return out


@pytest.mark.parametrize("name", MODELS)
def test_megatron_loads_what_convert_writes(models, one, name):
    assert same_bits(load_file(one / f"{name}.safetensors"), read(models[name]))
    assert not same_bits(load_file(one / f"{name}.safetensors"), read(models["qwen2" if name == "moe" else "moe"]))


@pytest.mark.parametrize("name", MODELS)
def test_state_dicts_have_the_states_of_transformer_engine_and_load_with_any(one, name):
    found = json.loads((one / f"{name}.states.json").read_text())
    layers = {"moe": "*E" * 3, "qwen2": "*-" * 3, "hybrid": "M*-EMEM"}[name]
    norms = ("q_layernorm", "k_layernorm") if name == "moe" else ()
    attention = [f"self_attention.{x}" for x in ("linear_qkv", "core_attention", "linear_proj", *norms)]
    experts = ["pre_mlp_layernorm", "mlp.experts.linear_fc1", "mlp.experts.linear_fc2"]
    if name == "hybrid":
        experts += [f"mlp.{x}" for x in ("fc1_latent_proj", "fc2_latent_proj")]
        experts += [f"mlp.shared_experts.{x}" for x in ("linear_fc1", "linear_fc2")]
    modules = {
        "M": ["mixer.in_proj", "mixer.out_proj"],
        "*": attention,
        "-": ["mlp.linear_fc1", "mlp.linear_fc2"],
        "E": experts,
    }
    wanted = [f"decoder.layers.{i}.{module}" for i, kind in enumerate(layers) for module in modules[kind]]
    wanted += ["decoder.final_norm", "output_layer"]
    assert sorted(found["names"]) == sorted(f"{module}._extra_state" for module in wanted)
    assert found["refused"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "kind"), [(n, "learner") for n in MODELS] + [(n, "stock") for n in GPT])
def test_checkpoints_of_the_learner_and_of_a_stock_gpt_model_are_read(models, one, tmp_path, name, form, kind):
    to_hf(one / f"{name}_{form}_{kind}", tmp_path / "back", models[name])
    assert same_bits(read(tmp_path / "back"), read(models[name]))


@pytest.mark.parametrize("form", ["numbered", "singleton"])
def test_the_learners_experts_are_saved_as_megatrons(one, form):
    ours, theirs = (json.loads((one / f"moe_{form}_{kind}.0.json").read_text()) for kind in ("learner", "stock"))
    assert ours == theirs
    assert len(ours) == 3 * 6 * (3 + 2)  # layers, experts: gate, up, down and two states


def test_the_learners_mamba_mixer_is_saved_as_megatrons(many):
    """Megatron's keeps dt_bias in the model's dtype."""
    files = sorted(many.glob("mixers.*.json"))
    assert len(files) in (2, 4)
    for rank, file in enumerate(files):
        ours, theirs = json.loads(file.read_text())
        bias = "decoder.layers.0.mixer.dt_bias decoder.layers.0.mixer.dt_bias"
        assert (ours[bias].pop(), theirs[bias].pop()) == ("torch.float32", "torch.bfloat16")
        tensors = {name: entry for name, entry in ours.items() if "_extra_state" not in name}
        assert ours == theirs and len(tensors) == 5 + 1 + 3 + 3 + 5
        block = "decoder.layers.0.mixer.in_proj.weight decoder.layers.0.mixer.in_proj.weight.B"
        rows = 20 // len(files)
        assert tensors[block] == [[20, 64], [rows * rank, 0], [0, 0, 0], [rows, 64], "torch.bfloat16"]


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_of_one_layout_is_whole_under_another(models, many, tmp_path, name):
    to_hf(many / f"{name}_saved", tmp_path / "back", models[name])
    for found in (
        read(tmp_path / "back"),
        *(load_file(many / f"{name}_{x}.safetensors") for x in ("own", "converted")),
    ):
        assert same_bits(found, read(models[name]))


def test_what_is_not_of_the_language_model_is_carried_along(models, many, tmp_path):
    """Exported by the learner, and converted from what Megatron has saved of the language model."""
    to_hf(many / "omni_saved", tmp_path / "back", models["omni"])
    tensors = read(models["omni"])
    assert same_bits(read(tmp_path / "back"), tensors) and same_bits(read(many / "omni"), tensors)
    source, exported = (json.loads((x / "config.json").read_text()) for x in (models["omni"], many / "omni"))
    source["llm_config"]["dtype"] = "float32"
    assert exported == source
