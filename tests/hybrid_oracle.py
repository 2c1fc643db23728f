"""Nemotron-H in plain torch and float64, token after token in its Mamba layers, one response at a time."""

import torch
from torch import Tensor
from torch.nn.functional import pad, relu, silu, softplus

from megatron_rlzero.architectures.nemotron_h import pattern


def log_probs(hf: dict, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """[n] -> [n - 1]: natural log-probability of each token but the first."""
    eps = hf["layer_norm_epsilon"]
    layers = {"M": _mamba, "*": _attention, "-": _mlp, "E": _moe}
    x = weights["backbone.embeddings.weight"][tokens]
    for i, symbol in enumerate(pattern(hf)):
        prefix = f"backbone.layers.{i}."
        mine = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        mixer = {name.removeprefix("mixer."): w for name, w in mine.items() if name.startswith("mixer.")}
        x = x + layers[symbol](hf, mixer, _norm(x, mine["norm.weight"], eps))
    logits = _norm(x, weights["backbone.norm_f.weight"], eps) @ weights["lm_head.weight"].T
    return logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def _mamba(hf: dict, w: dict[str, Tensor], x: Tensor) -> Tensor:
    heads, groups, n = hf["mamba_num_heads"], hf["n_groups"], len(x)
    inner, state = heads * hf["mamba_head_dim"], groups * hf["ssm_state_size"]
    z, xbc, dt = (x @ w["in_proj.weight"].T).split((inner, inner + 2 * state, heads), -1)
    width = hf["conv_kernel"]
    past = pad(xbc, (0, 0, width - 1, 0))
    xbc = silu(w["conv1d.bias"] + sum(w["conv1d.weight"][:, 0, k] * past[k : k + n] for k in range(width)))
    u, b, c = xbc.split((inner, state, state), -1)
    dt = softplus(dt + w["dt_bias"]).clamp(min=hf["time_step_min"])
    decay = (-w["A_log"].exp() * dt).exp()
    u = u.unflatten(-1, (heads, -1))
    b, c = (v.unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, 1) for v in (b, c))
    h, ys = u.new_zeros(heads, u.shape[-1], b.shape[-1]), []
    for t in range(n):
        h = decay[t, :, None, None] * h + (dt[t, :, None] * u[t])[..., None] * b[t, :, None]
        ys.append((h * c[t, :, None]).sum(-1) + w["D"][:, None] * u[t])
    gated = (torch.stack(ys).flatten(1) * silu(z)).unflatten(-1, (groups, -1))
    normed = gated * (gated.square().mean(-1, keepdim=True) + hf["layer_norm_epsilon"]).rsqrt()
    return (normed.flatten(1) * w["norm.weight"]) @ w["out_proj.weight"].T


def _attention(hf: dict, w: dict[str, Tensor], x: Tensor) -> Tensor:
    heads, groups, n = hf["num_attention_heads"], hf["num_key_value_heads"], len(x)
    q, k, v = (
        (x @ w[f"{name}_proj.weight"].T).view(n, count, -1).transpose(0, 1)
        for name, count in (("q", heads), ("k", groups), ("v", groups))
    )
    k, v = (t.repeat_interleave(heads // groups, 0) for t in (k, v))
    scores = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    out = scores.masked_fill(~causal, -torch.inf).softmax(-1) @ v
    return out.transpose(0, 1).flatten(1) @ w["o_proj.weight"].T


def _mlp(hf: dict, w: dict[str, Tensor], x: Tensor, module: str = "") -> Tensor:
    return relu(x @ w[f"{module}up_proj.weight"].T).square() @ w[f"{module}down_proj.weight"].T


def _moe(hf: dict, w: dict[str, Tensor], x: Tensor) -> Tensor:
    scores = (x @ w["gate.weight"].T).sigmoid()
    choice = (scores + w["gate.e_score_correction_bias"]).unflatten(-1, (hf["n_group"], -1))
    best = choice.topk(2).values.sum(-1).topk(hf["topk_group"]).indices
    kept = torch.zeros_like(choice[..., 0], dtype=torch.bool).scatter(1, best, True)
    chosen = choice.masked_fill(~kept[..., None], -torch.inf).flatten(1).topk(hf["num_experts_per_tok"]).indices
    picked = scores.gather(1, chosen)
    picked = picked / picked.sum(-1, keepdim=True) * hf["routed_scaling_factor"]
    probabilities = torch.zeros_like(scores).scatter(1, chosen, picked)
    latent = x @ w["fc1_latent_proj.weight"].T if hf.get("moe_latent_size") else x
    outputs = torch.stack([_mlp(hf, w, latent, f"experts.{e}.") for e in range(hf["n_routed_experts"])], 1)
    routed = (probabilities[..., None] * outputs).sum(1)
    if hf.get("moe_latent_size"):
        routed = routed @ w["fc2_latent_proj.weight"].T
    return routed + _mlp(hf, w, x, "shared_experts.")
