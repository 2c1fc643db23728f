"""The theory: identities that hold, ones that must not, and the Gaussian model against its own simulation."""

import numpy as np
import pytest

from megatron_rlzero import cli, theory
from megatron_rlzero.theory import Gaussian, identities


@pytest.mark.parametrize("seed", [0, 1])
def test_identities_hold(seed):
    assert max(identities(seed=seed).values()) < 1e-15


def test_a_wrong_identity_is_noticed(monkeypatch, capsys):
    monkeypatch.setattr(theory, "TOLERANCE", 0.0)
    assert cli.main(["theory"]) == 1
    assert "E_q[w s] = 0" in capsys.readouterr().out


def test_the_published_figures():
    matched, off = Gaussian(0.0), Gaussian(0.2)
    assert f"{matched.errors(200)[-1]:.4f} {off.errors(200)[-1]:.4f}" == "0.3000 68.2693"
    assert f"{matched.stable:.4f} {off.stable:.4f}" == "0.6667 0.5928"
    assert (matched.a, off.a) == pytest.approx((0.88, 1.014601), abs=1e-6)
    assert Gaussian(0.2, learning_rate=off.stable).a == pytest.approx(1.0)


@pytest.mark.parametrize("kappa", [0.0, 0.2, 0.5])
def test_simulated_steps_agree_with_the_recursion(kappa):
    """The first step's moment is that of 4 million samples; another kappa's is far outside their error."""
    model = Gaussian(kappa)
    simulated = model.simulate(1, 4_000_000)[1]
    assert simulated == pytest.approx(model.errors(1)[1], rel=0.02)
    assert simulated != pytest.approx(Gaussian(kappa + 0.3).errors(1)[1], rel=0.05)


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(theory, "SAMPLES", 2000)
    file = tmp_path / "theory.png"
    assert cli.main(["theory", "--plot", str(file)]) == 0
    out = capsys.readouterr().out
    for figure in ("0.3000", "68.2693", "0.6667", "0.5928", "E_q[w A s] = E_p[A s]", "token weights"):
        assert figure in out
    assert file.stat().st_size > 10_000
    assert np.isfinite(Gaussian(0.2).simulate(10, 100)).all()
