"""All model families and the objective in plain torch and float64, one response at a time: the reference."""

import math

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from tests import hybrid_oracle


def log_probs(hf: dict, weights: dict[str, Tensor], tokens: Tensor, gates: list[Tensor] | None = None) -> Tensor:
    """[n] -> [n - 1]: natural log-probability of each token but the first; ``gates`` gets every router's logits."""
    if hf["model_type"] == "nemotron_h":
        return hybrid_oracle.log_probs(hf, weights, tokens)
    heads, groups, n, eps = hf["num_attention_heads"], hf["num_key_value_heads"], len(tokens), hf["rms_norm_eps"]
    dim = hf.get("head_dim") or hf["hidden_size"] // heads
    angle = torch.arange(n, dtype=torch.float64)[:, None] * frequencies(hf["rope_parameters"], dim)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]

    def norm(x, w):
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w

    def rotate(x):
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    causal = torch.ones(n, n, dtype=torch.bool).tril()
    x = weights["model.embed_tokens.weight"][tokens]
    for i in range(hf["num_hidden_layers"]):
        w = {k.removeprefix(f"model.layers.{i}."): v for k, v in weights.items() if k.startswith(f"model.layers.{i}.")}
        h = norm(x, w["input_layernorm.weight"])
        q, k, v = (h @ w[f"self_attn.{p}_proj.weight"].T + w.get(f"self_attn.{p}_proj.bias", 0) for p in "qkv")
        q, k, v = (x.unflatten(1, (-1, dim)) for x in (q, k, v))
        if "self_attn.q_norm.weight" in w:
            q, k = norm(q, w["self_attn.q_norm.weight"]), norm(k, w["self_attn.k_norm.weight"])
        q, k = rotate(q), rotate(k)
        k, v = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
        p = scores.masked_fill(~causal, float("-inf")).softmax(-1)
        x = x + torch.einsum("hqk,khd->qhd", p, v).flatten(1) @ w["self_attn.o_proj.weight"].T
        h = norm(x, w["post_attention_layernorm.weight"])
        if "mlp.gate.weight" not in w:
            gate, up, down = (w[f"mlp.{m}_proj.weight"] for m in ("gate", "up", "down"))
            x = x + (silu(h @ gate.T) * (h @ up.T)) @ down.T
            continue
        gate = h @ w["mlp.gate.weight"].T
        if gates is not None:
            gates.append(gate)
        p = gate.softmax(-1)
        top, chosen = p.topk(hf["num_experts_per_tok"], -1)
        if hf["norm_topk_prob"]:
            top = top / top.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for e in range(p.shape[1]):
            rows, slot = (chosen == e).nonzero(as_tuple=True)
            expert = {m: w[f"mlp.experts.{e}.{m}_proj.weight"] for m in ("gate", "up", "down")}
            y = (silu(h[rows] @ expert["gate"].T) * (h[rows] @ expert["up"].T)) @ expert["down"].T
            out = out.index_add(0, rows, y * top[rows, slot, None])
        x = x + out
    head = weights["model.embed_tokens.weight" if hf["tie_word_embeddings"] else "lm_head.weight"]
    logits = norm(x, weights["model.norm.weight"]) @ head.T
    return logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


def frequencies(rope: dict, dim: int) -> Tensor:
    """float64 [dim / 2], wavelength by wavelength as Llama 3.1's release describes its scaling."""
    result = []
    for i in range(dim // 2):
        f = rope["rope_theta"] ** (-2 * i / dim)
        if rope["rope_type"] == "llama3":
            factor, low, high = (rope[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
            length, wavelength = rope["original_max_position_embeddings"], 2 * math.pi / f
            if wavelength > length / low:
                f = f / factor
            elif wavelength >= length / high:
                smooth = (length / wavelength - low) / (high - low)
                f = (1 - smooth) * f / factor + smooth * f
        result.append(f)
    return torch.tensor(result, dtype=torch.float64)


def selective_scan(x, dt, A, B, C, D, dt_bias, lengths, dt_limit=(0.0, math.inf), initial=None) -> Tensor:
    """The scan of Mamba-2, token by token: h = exp(A dt) h + dt x B^T, y = h C + D x; shapes as in kernels/mamba."""
    heads, groups, out = x.shape[1], B.shape[1], []
    dt = softplus(dt + dt_bias).clamp(*dt_limit)
    B, C = (t.repeat_interleave(heads // groups, 1) for t in (B, C))
    documents = zip(*(t.split(lengths) for t in (x, dt, B, C)), strict=True)
    for i, document in enumerate(documents):
        h = x.new_zeros(heads, x.shape[2], B.shape[2]) if initial is None else initial[i]
        for x_t, dt_t, B_t, C_t in zip(*document, strict=True):
            h = (A * dt_t).exp()[:, None, None] * h + torch.einsum("h,hp,hn->hpn", dt_t, x_t, B_t)
            out.append(torch.einsum("hpn,hn->hp", h, C_t) + D[:, None] * x_t)
    return torch.stack(out)


def objective(hf: dict, weights: dict[str, Tensor], responses: list[dict]) -> Tensor:
    """-(1/B) sum_i (1/T_i) sum_t A_i w_it, written down from its formula.

    Each response has ``tokens`` int64 [n], ``action`` bool [n], ``log_mu`` float64 [n] and ``advantage``.
    """
    total = torch.zeros((), dtype=torch.float64)
    for r in responses:
        action = r["action"][1:]
        if action.any():
            ratio = (log_probs(hf, weights, r["tokens"]) - r["log_mu"][1:])[action].exp()
            total = total - r["advantage"] * ratio.mean()
    return total / len(responses)


def router_losses(hf: dict, weights: dict[str, Tensor], responses: list[dict]) -> tuple[Tensor, Tensor]:
    """Load-balancing loss (Switch Transformers, 2021) and z loss (ST-MoE, 2022) of all layers, each over all tokens."""
    gates: list[list[Tensor]] = []
    for r in responses:
        gates.append([])
        log_probs(hf, weights, r["tokens"], gates[-1])
    balance = z = torch.zeros((), dtype=torch.float64)
    for logits in map(torch.cat, zip(*gates, strict=True)):
        k, (tokens, experts) = hf["num_experts_per_tok"], logits.shape
        p = logits.softmax(-1)
        share = torch.bincount(p.topk(k, -1).indices.flatten(), minlength=experts) / (tokens * k)
        balance = balance + experts * (share * p.mean(0)).sum()
        z = z + logits.logsumexp(-1).square().mean()
    return balance, z
