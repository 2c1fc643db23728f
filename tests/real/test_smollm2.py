"""Real weights: SmolLM2-135M-Instruct, converted and exported, in the engine, in the learner and in transformers."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_rlzero.architectures import architecture, read_config
from tests.parity.engine import Results
from tests.parity.runs import MIXED, PP2, differing, score, start

pytestmark = pytest.mark.real
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What is 17 + 25? Answer with the number alone.",
    "List three animals that can fly, then say for each of them what it eats and where it sleeps at night.",
)
NAMES = ("smollm2_fp32", "smollm2_bf16")


@pytest.fixture(scope="module")
def exported(smollm2, tmp_path_factory) -> Path:
    """Converted to a Megatron checkpoint of six ranks, verified, and exported from it, verified again."""
    work = tmp_path_factory.mktemp("converted")
    sizes = ["--tensor-model-parallel-size", "3", "--pipeline-model-parallel-size", "2"]
    for source, target, to in (
        (smollm2, work / "megatron", ["megatron", *sizes]),
        (work / "megatron", work / "hf", ["hf"]),
    ):
        command = [
            sys.executable,
            "-m",
            "megatron_rlzero",
            "convert",
            str(source),
            str(target),
            "--verify",
            "--to",
            *to,
        ]
        subprocess.run(command, check=True)
    return work / "hf"


@pytest.fixture(scope="module")
def models(exported) -> dict[str, Path]:
    return {"smollm2": exported}


def test_conversion_keeps_every_bit(smollm2, exported):
    before, after = (load_file(directory / "model.safetensors") for directory in (smollm2, exported))
    assert before.keys() == after.keys() and len(after) == 272
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)


@pytest.fixture(scope="module")
def engine(models, tmp_path_factory) -> dict[str, Results]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models["smollm2"])
    chats = ([{"role": "user", "content": question}] for question in QUESTIONS)
    prompts = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    runs = [
        {
            "name": name,
            "engine": {"model": str(models["smollm2"]), "dtype": name.split("_")[1], **MIXED},
            "prompts": prompts,
            "new_tokens": 24,
            "alone": [0, 3],
        }
        for name in NAMES
    ]
    return start(models, tmp_path_factory.mktemp("engine"), "aligned", runs)


@pytest.fixture(scope="module")
def learner(models, engine, tmp_path_factory) -> dict[str, Tensor]:
    cases = {name: (name, {}) for name in NAMES} | {"other_slices": (NAMES[0], {"reduction_slices": 1})}
    return score(models, engine, tmp_path_factory.mktemp("learner"), cases)


def test_the_family_knows_the_checkpoint(smollm2):
    hf = read_config(smollm2)
    family = architecture(hf)
    assert family.unsupported(hf) == []
    assert sum(torch.Size(shape).numel() for shape in family.tensors(hf).values()) == 134_515_008


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_is_the_learner(engine, learner, name):
    found = engine[name]
    assert len(found.together) == 24 * len(QUESTIONS)
    assert differing(found.together, found.prefill) == 0
    ran = ~found.alone.isnan()
    assert differing(found.together[ran], found.alone[ran]) == 0
    assert differing(found.together, learner[name]) == 0


def test_the_comparison_can_fail(engine, learner):
    assert differing(learner["other_slices"], engine["smollm2_fp32"].together) > 48
    assert differing(learner["smollm2_bf16"], learner["smollm2_fp32"]) > 48


def test_two_pipeline_stages(models, engine, tmp_path):
    (found,) = score(models, engine, tmp_path, {"pp2": (NAMES[0], PP2)}, world=2).values()
    assert differing(found, engine[NAMES[0]].together) == 0


def test_the_learner_is_transformers(models, engine, learner):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(models["smollm2"], dtype=torch.float32)
    results = engine["smollm2_fp32"]
    expected = []
    for sequence, prompt in zip(results.tokens.split(results.lengths.tolist()), results.prompts.tolist(), strict=True):
        tokens = sequence.long()
        with torch.no_grad():
            log_probs = reference(tokens[None]).logits[0, :-1].log_softmax(-1)
        expected.append(log_probs.gather(1, tokens[1:, None])[prompt - 1 :, 0])
    difference = float((torch.cat(expected) - learner["smollm2_fp32"]).abs().max())
    assert 0 < difference < 1e-4
    # Trained weights, read rightly: what is sampled at temperature 1 is far likelier than log 1/49152 = -10.8.
    assert float(learner["smollm2_fp32"].mean()) > -4
