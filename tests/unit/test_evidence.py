"""Evidence in one process: vectorised formulas are the project's, queues keep their rule, resumed runs their bytes."""

import numpy as np
import pytest
import torch

from megatron_rlzero import advantage, diagnostics, objectives
from tools.evidence import dose_response, policy, results, runs, survival
from tools.evidence.policy import END, LIMIT, Learner
from tools.evidence.rollouts import Rollouts
from tools.evidence.runs import METRICS, Arm, Plan, Run

ARMS = (Arm(0, 0.0, 1e-3), Arm(0, 0.5, 2e-3), Arm(1, 0.5, 2e-3))


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """A short warm-up; one thread."""
    monkeypatch.setattr(runs, "WARM_UP", (3, 16, 3e-3, 4.0))
    monkeypatch.setattr(runs, "EVALUATED", 16)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def batch(run, length=LIMIT):
    """prompt, tokens, log mu, mask and rewards of a batch of random responses."""
    generator = torch.Generator().manual_seed(0)
    arms, size = len(run.plan.arms), 16
    lengths = torch.randint(1, length + 1, (arms, size, 1), generator=generator)
    tokens = torch.randint(0, END, (arms, size, length), generator=generator)
    prompt = torch.randint(0, 3, (arms, size, policy.VOCABULARY), generator=generator)
    log_mu = -torch.rand(arms, size, length, generator=generator) - 1
    rewards = torch.randint(0, 2, (arms, size), generator=generator).float()
    return prompt, tokens, log_mu, torch.arange(length) < lengths, rewards


@pytest.mark.parametrize("objective", objectives.OBJECTIVES)
def test_objective_gradient_and_metrics_of_an_arm_are_the_projects(objective):
    estimator, other = ("grpo", "batch_mean") if objective == "grpo" else ("batch_mean", "grpo")
    run = Run(Plan(ARMS, 1, 16, batch=16, dtype=torch.float32, objective=objective, samples=4))
    prompt, tokens, log_mu, mask, rewards = batch(run)
    weight = mask / mask.sum(-1, keepdim=True)
    _, found = run.learner.gradients(prompt, tokens, log_mu, weight, rewards)
    # Of growing distance: the gate of flash_reinforce keeps some responses.
    log_mu = (found["log_pi"] + (log_mu + 1.5) * torch.arange(16)[:, None] / 16).clamp(max=-0.01)
    gradients, found = run.learner.gradients(prompt, tokens, log_mu, weight, rewards)
    for i in range(len(ARMS)):
        params = {k: p[i : i + 1].clone().requires_grad_() for k, p in run.learner.params.items()}
        whole = policy.log_probs(params, policy.states(prompt[i : i + 1], tokens[i : i + 1], torch.float32))
        log_pi = whole[0].gather(-1, tokens[i].reshape(-1, 1))[:, 0]
        response = torch.arange(16).repeat_interleave(LIMIT)

        def gradient(name, log_pi=log_pi, params=params, i=i, response=response):
            a = torch.from_numpy(advantage.compute(name, rewards[i].numpy(), np.arange(16) // 4))[response]
            total = objectives.OBJECTIVES[objective](log_pi, log_mu[i].flatten(), a, weight[i].flatten(), response)
            return torch.autograd.grad(total / 16, list(params.values()), retain_graph=True)

        for name, expected, wrong in zip(params, gradient(estimator), gradient(other), strict=True):
            torch.testing.assert_close(gradients[name][i], expected[0], rtol=1e-4, atol=1e-7)
            assert not torch.allclose(gradients[name][i], wrong[0], rtol=1e-2, atol=1e-7)
        d = (found["log_pi"][i].double() - log_mu[i].double())[mask[i]].numpy()
        expected = diagnostics.rollout_kl(d) | diagnostics.importance(d)
        for name, value in policy.metrics(found["log_pi"], log_mu, mask).items():
            prefix = "rollout_kl" if name == "k3" else "is"
            assert float(value[i]) == pytest.approx(expected[f"{prefix}/{name}"], rel=1e-9), name


def test_a_step_is_torchs_adam_after_its_clipping():
    learner = Learner(policy.initial([0, 1]), torch.tensor([1e-2, 1e-3]), torch.tensor([0.5, torch.inf]), torch.float32)
    leaves = [{k: torch.nn.Parameter(p[i].clone()) for k, p in learner.params.items()} for i in range(2)]
    rates = ((1e-2, 0.5), (1e-3, torch.inf))
    adams = [torch.optim.Adam(p.values(), betas=policy.BETAS, eps=policy.EPS) for p in leaves]
    for step in range(1, 13):
        generator = torch.Generator().manual_seed(step)
        gradients = {k: torch.randn(p.shape, generator=generator) for k, p in learner.params.items()}
        norm, _ = learner.step(gradients, torch.zeros(2))
        for i, (adam, (rate, clip)) in enumerate(zip(adams, rates, strict=True)):
            for name, p in leaves[i].items():
                p.grad = gradients[name][i].clone()
            adam.param_groups[0]["lr"] = rate * min(1.0, step / policy.RISE)
            assert float(norm[i]) == pytest.approx(float(torch.nn.utils.clip_grad_norm_(leaves[i].values(), clip)))
            adam.step()
    for i in range(2):
        for name, p in leaves[i].items():
            torch.testing.assert_close(learner.params[name][i], p.detach(), rtol=1e-5, atol=1e-6)


def test_an_arm_that_is_not_finite_stops_alone():
    learner = Learner(policy.initial([0, 1]), torch.full((2,), 1e-2), torch.ones(2), torch.float32)
    before = {k: p.clone() for k, p in learner.params.items()}
    bad = {k: torch.ones_like(p) for k, p in before.items()}
    bad["w2"][0, 0, 0] = torch.nan
    learner.step(bad, torch.zeros(2))
    learner.step({k: torch.ones_like(p) for k, p in before.items()}, torch.zeros(2))
    assert learner.alive.tolist() == [False, True]
    for name, p in learner.params.items():
        assert torch.equal(p[0], before[name][0]) and not torch.equal(p[1], before[name][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_noise_and_lag_sampler_and_learner_have_the_same_bits(dtype):
    run = Run(Plan(ARMS, 4, 16, batch=16, every=2, dtype=dtype))
    for _ in range(4):
        run.update()
    differing, weight = (run.log[..., METRICS.index(name)] for name in ("differing", "ratio_max"))
    assert (differing[:, 0] == 0).all() and (weight[:, 0] == 1).all()
    assert (differing[:, 1:] > 0.9).all() and (run.held_out[..., 1] == 0).all()


def test_noise_depends_on_seed_prompt_and_position_alone():
    prompts = torch.arange(100, 110)
    whole = policy.noise([3, 4], 0, policy.DRAW, prompts, 8)
    assert torch.equal(policy.noise([4], 0, policy.DRAW, prompts[5:], 4), whole[1:, 5:, :4])
    assert not torch.equal(policy.noise([4], 0, policy.LOGITS, prompts[5:], 4), whole[1:, 5:, :4])
    numbers = policy.normal(policy.noise([0], 0, policy.LOGITS, torch.arange(2000), 8)).flatten()
    assert float(numbers.mean()) == pytest.approx(0, abs=0.01) and float(numbers.std()) == pytest.approx(1, abs=0.01)


def test_the_program_that_checks():
    digits = torch.tensor([[[3, 1, 1, *[5] * (policy.LONGEST - 3)]]])
    counts, answer = policy.make(digits, torch.tensor([[0.9]]), torch.tensor([3.0]))
    assert counts[0, 0].tolist() == [0, 2, 0, 1, 0, 0, 0, policy.LONGEST - 3]
    assert answer[0, 0].tolist() == [1, 1, 3, *[END] * (LIMIT - 3)]
    assert policy.reward(answer, answer).tolist() == [[1.0]]
    assert policy.reward(answer.flip(-1), answer).tolist() == [[0.0]]


def ages(rule, lag, updates=60):
    """Largest age of a token in each update, with random weights and so responses of all lengths."""
    seeds, arms, size = [0, 1], torch.tensor([0, 1]), 16
    rollouts = Rollouts(seeds, arms, torch.zeros(2), (lag + 1) * size, size, rule)
    weights, difficulty = policy.initial(seeds), torch.full((2,), 6.0)
    for first in range(0, (lag + 1) * size, size):
        rollouts.start(torch.arange(first, first + size).expand(2, -1), difficulty)
    largest, started = [], []
    for u in range(updates):
        ticks = 0
        while ticks < 1 or not rollouts.ready(u):
            rollouts.advance(weights, u)
            ticks += 1
        slots = rollouts.take(u)
        at = (rollouts.rows, slots)
        lengths, versions = rollouts.tensors["length"][at], rollouts.tensors["version"][at]
        mask = torch.arange(LIMIT) < lengths[..., None]
        assert (lengths > 0).all() and (versions[mask] >= 0).all()
        largest.append(int(torch.where(mask, u - versions, 0).max()))
        started.append(rollouts.tensors["gumbel"][at][:, :, 0, 0])
        rollouts.start(slots, difficulty)
    return largest, started


@pytest.mark.parametrize("lag", [0, 2, 8])
def test_the_bound_holds_for_every_token(lag):
    largest, started = ages("bound", lag)
    assert max(largest) <= lag and largest[-1] == lag
    prompts = torch.arange(60 * 16)
    wanted = policy.noise([0, 1], 0, policy.DRAW, prompts, 1).float()[:, :, 0, 0]
    assert torch.equal(torch.cat(started, dim=1), wanted)  # each prompt once, in the update it belongs to


def test_the_queue_without_a_bound_breaks_it():
    largest, started = ages("first_finished", 8)
    assert max(largest) > 8
    assert all(len(np.unique(torch.cat(started, dim=1)[arm])) == 60 * 16 for arm in range(2))


def test_log_rank_against_a_hand_computation():
    """1, 3, 4+ against 2, 5+, 5+: at 1, 2, 3 E = 3/6 + 2/5 + 2/4 and V = 9/36 + 6/25 + 4/16."""
    one = (np.array([1.0, 3.0, 4.0]), np.array([True, True, False]))
    two = (np.array([2.0, 5.0, 5.0]), np.array([True, False, False]))
    chi2, p = survival.log_rank([(one, two)])
    assert chi2 == pytest.approx((2 - 1.4) ** 2 / 0.74)
    assert p == pytest.approx(0.4855, abs=1e-4)
    assert survival.log_rank([(two, one)]) == pytest.approx((chi2, p))
    assert survival.log_rank([(one, two), (one, two)])[0] == pytest.approx(1.2**2 / 1.48)
    tied = (np.array([2.0, 2.0, 2.0]), np.array([True, True, True]))  # n1 3 of 6, 3 + 0 collapse: V = 3*3*3*3/(36*5)
    assert survival.log_rank([(tied, (tied[0] + 9, tied[1]))])[0] > 3.84
    never = (np.full(3, 9.0), np.zeros(3, dtype=bool))
    assert survival.log_rank([(never, never)]) == (0.0, 1.0)


def test_collapse():
    finite = np.ones(700, dtype=bool)
    fine = np.array([0.2, 0.4, 0.5, 0.24, 0.24, 0.3, 0.6, 0.7])
    assert survival.collapse(fine, 100, finite) == (700, False)
    assert survival.collapse(np.array([0.2, 0.4, 0.5, 0.24, 0.24, 0.1, 0.6, 0.7]), 100, finite) == (300, True)
    finite[42] = False
    assert survival.collapse(fine, 100, finite) == (42, True)


@pytest.mark.parametrize("rule", ["bound", "first_finished"])
def test_killed_and_resumed_equals_unbroken_to_the_byte(tmp_path, rule):
    plan = Plan(ARMS, 12, 32, rule, batch=16, every=4)
    unbroken, broken = tmp_path / "unbroken.pt", tmp_path / "broken.pt"
    Run(plan).run(unbroken, chunk=5)
    Run(plan).run(broken, chunk=5, stop=5)
    half = Run(plan)
    half.run(broken, chunk=5, stop=7)
    assert int(half.done) == 7
    Run(plan).run(broken, chunk=5)
    one, two = (torch.load(file, weights_only=True) for file in (unbroken, broken))
    assert all(torch.equal(one[k], two[k]) for k in one if k != "seconds")
    other = Plan((*ARMS[:2], Arm(2, 0.5, 2e-3)), 12, 32, rule, batch=16, every=4)
    texts = []
    for name, p in (("unbroken", plan), ("broken", plan), ("other", other)):
        run = Run(p)
        run.run(tmp_path / f"{name}.pt")
        results.write_csv(tmp_path / f"{name}.csv", ["x"] * 14, dose_response.rows(run))
        texts.append((tmp_path / f"{name}.csv").read_bytes())
    assert texts[0] == texts[1] != texts[2] and texts[0].count(b"\n") == 1 + 3 * 3
    with pytest.raises(ValueError, match="another plan"):
        Run(other).run(unbroken)
