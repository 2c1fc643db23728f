"""Against an independent float64 reference: values module by module, every gradient, and steps of the optimizer.

Everything is fp32 on the learner's side, on one rank; then the same steps under other layouts, to the bit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megatron_rlzero.align import documents, reference
from megatron_rlzero.align.causes import causes
from megatron_rlzero.align.check import ONE_RANK, layouts
from megatron_rlzero.align.job import run_learner, with_settings
from megatron_rlzero.align.ledger import Outcome
from megatron_rlzero.align.pairs import pairs
from megatron_rlzero.architectures import architecture, in_transformers, read_config
from megatron_rlzero.config import Config

STEPS = 2
#: largest differences that pass: of a module's output and of a gradient, relative to the largest element; of a step of
#: the optimizer, relative to the learning rate
OUTPUT, GRADIENT, UPDATE = 1e-5, 1e-5, 2e-3
#: a learning rate and a weight decay under which a step that should not be there would be seen; fp32 rounds weights
OPTIMIZER = {"lr": 1e-2, "lr_warmup_updates": 0, "weight_decay": 0.3, "clip_grad": 0.5, "adam_eps": 1e-5}
PROMPTS = 4


def gradcheck(config: Config, out: Path) -> Outcome:
    """Passed where all are within tolerance, layouts give the same bits, and the controls are noticed."""
    hf = read_config(config.model.path)
    model = in_transformers.load(config.model.path, torch.float64)
    matched = pairs(hf, model, config.reduction_slices)
    prompts = [p for p in documents.prompts(hf["vocab_size"], hf["max_position_embeddings"]) if len(p) > 1][:PROMPTS]
    settings = {"model.dtype": "fp32", "learner.max_tokens_per_microbatch": 64}
    settings |= {f"learner.optimizer.{name}": value for name, value in OPTIMIZER.items()}
    outputs = {"kind": "outputs", "name": "outputs", "prompts": prompts, "modules": [a for _, a, _ in matched]}
    one = with_settings(config, ONE_RANK | settings)
    run_learner(one, out, [outputs, {"kind": "steps", "name": "steps", "steps": STEPS}])
    two = exact_layouts(hf)
    for name, sizes in two.items():
        run_learner(with_settings(one, sizes), out, [{"kind": "steps", "name": name, "steps": STEPS}])

    lines, tables, values = [], {}, {}
    rows = _outputs(model, matched, prompts, load_file(out / "learner-outputs.safetensors"))
    tables["Values against float64"] = [["module", "largest difference"], *([n, f"{e:.1e}"] for n, e in rows)]
    if wrong := [(n, e) for n, e in rows if not e <= OUTPUT]:
        name, error = wrong[0]
        lines.append(
            f"{name} is the first module whose output differs from transformers', by {error:.1e} of its largest"
        )
        lines.append(f"look at: {causes(name)}")
    steps = load_file(out / "learner-steps.safetensors")
    drawn = documents.responses(hf["vocab_size"], hf["max_position_embeddings"])
    loss, gradients = reference.gradients(model, drawn.rollouts, drawn.advantages)
    gradients = {n: g for n, g in gradients.items() if not n.endswith(architecture(hf).BUFFERS)}
    found, table = gradient_faults(steps, loss, gradients, depths(hf))
    lines += found
    tables["Gradients against float64"] = table
    lines += optimizer_faults(steps)
    for name in two:
        other = load_file(out / f"learner-{name}.safetensors")
        bad = [n for n in other if not torch.equal(other[n], steps[n])]
        lines += [f"{name}: {len(bad)} tensors differ from one rank's, the first {bad[0]}"] if bad else []
    passed = not lines
    if passed:
        worst = max(e for _, e in rows)
        lines = [
            f"{len(rows)} modules within {worst:.1e} of float64, {len(gradients)} gradients within "
            f"{max(_errors(steps, gradients).values()):.1e}; {STEPS} steps of the optimizer as computed; "
            f"the same bits on one rank and on {', '.join(two) or 'no other layout'}"
        ]
        values = {"output": worst, "gradient": max(_errors(steps, gradients).values())}
    return Outcome(passed, lines, tables, values)


def exact_layouts(hf: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Those in which sums run over the same elements as on one rank: with tied embeddings not over stages."""
    return {n: s for n, s in layouts(hf).items() if n != "PP2" or not hf.get("tie_word_embeddings", False)}


def _outputs(
    model: nn.Module,
    matched: Sequence[tuple[str, str, str]],
    prompts: Sequence[Sequence[int]],
    learner: dict[str, Tensor],
) -> list[tuple[str, float]]:
    """(what it is, largest difference over the largest element), in the order of the reference's forward pass."""
    kept: dict[str, list[Tensor]] = {}
    handles = [
        model.get_submodule(theirs).register_forward_hook(
            lambda m, inputs, out, what=what: kept.setdefault(what, []).append(
                out[0] if isinstance(out, tuple) else out
            )
        )
        for what, _, theirs in matched
    ]
    with torch.no_grad():
        for prompt in prompts:
            reference.log_probs(model, torch.tensor(prompt))
    for handle in handles:
        handle.remove()
    mine = {what: learner[name] for what, name, _ in matched}
    rows = []
    for what, outputs in kept.items():
        wanted = torch.cat([x.reshape(len(p), -1) for x, p in zip(outputs, prompts, strict=True)])
        if wanted.shape != mine[what].shape:
            raise ValueError(f"{what}: {tuple(mine[what].shape)} on the learner, {tuple(wanted.shape)} in transformers")
        rows.append((what, error(mine[what], wanted)))
    return rows


def error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest wanted element; infinite for a NaN."""
    difference = (found.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1e-30)
    return float(difference.nan_to_num(nan=math.inf))


def _errors(steps: dict[str, Tensor], gradients: dict[str, Tensor]) -> dict[str, float]:
    """Of the first step's gradients, which the learner has clipped."""
    clip = min(1.0, OPTIMIZER["clip_grad"] / float(steps["norm.0"]))
    return {name: error(steps[f"grad.0.{name}"], clip * g) for name, g in gradients.items()}


def depths(hf: dict[str, Any]) -> dict[str, float]:
    """Tensor of the checkpoint -> Megatron's layer that it belongs to; -1 before the first, infinite after the last."""
    found: dict[str, float] = {}
    for parameter, rule in architecture(hf).parameters(hf, 1).items():
        layer = re.match(r"decoder\.layers\.(\d+)\.", parameter)
        depth = float(layer[1]) if layer else -1.0 if parameter.startswith("embedding.") else math.inf
        for piece in rule.pieces("", 0, 1):
            found[piece.tensor] = max(depth, found.get(piece.tensor, depth))
    return found


def gradient_faults(
    steps: dict[str, Tensor], loss: float, gradients: dict[str, Tensor], depth: dict[str, float]
) -> tuple[list[str], list[list[str]]]:
    """Lines about what is wrong with the first step's loss and gradients, and a table of all of them."""
    lines = []
    missing = sorted(name for name in gradients if f"grad.0.{name}" not in steps)
    if missing:
        return [f"the learner has no gradient of {', '.join(missing[:5])}"], [["tensor"], *([n] for n in missing)]
    if not math.isclose(float(steps["loss.0"]), loss, rel_tol=1e-5, abs_tol=1e-7):
        lines.append(f"the loss is {float(steps['loss.0']):.8g} on the learner and {loss:.8g} in float64")
    found = _errors(steps, gradients)
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    if not math.isclose(float(steps["norm.0"]), norm, rel_tol=1e-5):
        lines.append(f"the gradient's norm is {float(steps['norm.0']):.8g} on the learner and {norm:.8g} in float64")
    wrong = [name for name, e in found.items() if not e <= GRADIENT]
    if wrong:
        last = max(wrong, key=lambda name: (depth.get(name, math.inf), found[name]))
        lines.append(
            f"{len(wrong)} of {len(found)} gradients are wrong; the last of them in forward order, where it begins, is "
            f"that of {last}, by {found[last]:.1e}"
        )
        lines.append(f"all that are: {', '.join(sorted(wrong, key=lambda name: depth.get(name, math.inf)))}")
    worst_first = sorted(found.items(), key=lambda x: -x[1])
    return lines, [["tensor", "largest difference"], *([n, f"{e:.1e}"] for n, e in worst_first)]


def optimizer_faults(steps: dict[str, Tensor]) -> list[str]:
    """Lines about tensors whose weights after a step are not those that Adam makes of the learner's own gradients."""
    adam = reference.Adam(0.9, 0.95, OPTIMIZER["adam_eps"], OPTIMIZER["weight_decay"])
    weights = {name: w.double() for name, w in _of(steps, "weight", 0).items()}
    for n in range(STEPS):
        rate, after = float(steps[f"rate.{n}"]), _of(steps, "weight", n + 1)
        weights = adam.step(weights, _of(steps, "grad", n), rate)
        off = {name: float((after[name].double() - w).abs().max()) for name, w in weights.items()}
        rounding = {name: 2.0**-23 * (n + 1) * float(w.abs().max()) for name, w in weights.items()}
        wrong = [name for name, distance in off.items() if not distance <= UPDATE * rate + rounding[name]]
        if wrong:
            worst = max(wrong, key=off.__getitem__)
            return [
                f"step {n} of the optimizer moves {len(wrong)} of {len(weights)} tensors otherwise than Adam with "
                f"weight decay of matrices alone, most of all {worst}, by {off[worst] / rate:.1e} learning rates",
                f"all that it does: {', '.join(wrong)}",
            ]
    return []


def _of(steps: dict[str, Tensor], kind: str, n: int) -> dict[str, Tensor]:
    """Tensor -> its gradient of step ``n``, or its weights before it."""
    start = f"{kind}.{n}."
    return {name.removeprefix(start): x for name, x in steps.items() if name.startswith(start)}
