"""The command line of ``align``: one step, or all that are left, each with its gate."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile

from rich.console import Console
from rich.table import Table

from megatron_rlzero.align.ledger import ACCEPT, STEPS, Ledger, Outcome
from megatron_rlzero.config import Config
from megatron_rlzero.config_io import parse
from megatron_rlzero.validation import ConfigError, validate

Step = Callable[[Config, Path], Outcome]
#: tables of more rows are in the report alone
ROWS = 24


def run(parsed: Namespace) -> int:
    """Takes the step, or every step whose gate is not passed; 0 where all that were taken are passed, else 1."""
    console = Console(soft_wrap=True)
    out = Path(parsed.out or f"runs/align/{Path(parsed.model).name}")
    config = configuration(parsed, out)
    ledger = Ledger(out, Path(parsed.model), config.model.family)
    if parsed.step == ACCEPT:
        console.print(f"accepted: {ledger.accept()}", highlight=False)
        return 0
    steps = [name for name in STEPS if not ledger.passed(name)] if parsed.step == "all" else [parsed.step]
    for name in steps:
        if name != "proxy":
            config.model.path = str(checked(ledger, Path(parsed.model)))
        console.print(f"[bold]{name}[/bold]: {STEPS[name][1]}")
        begun, fingerprint = time.perf_counter(), ledger.fingerprint()
        outcome = step(name, ledger)(config, out / name)
        ledger.add(name, outcome, fingerprint, time.perf_counter() - begun)
        _show(console, outcome)
        if not outcome.passed:
            console.print(f"[bold red]{name}: not passed[/bold red]; {out / 'alignment.md'} has all of it")
            return 1
    following = ledger.next()
    console.print(
        f"passed; next: megatron-rlzero align {following} {parsed.model}" if following else "all gates are passed"
    )
    return 0


def step(name: str, ledger: Ledger) -> Step:
    """What a step does; imported when it is taken."""
    if name == "proxy":
        from megatron_rlzero.align.proxy import proxy as chosen
    elif name == "map":
        from megatron_rlzero.align.map import map_modules as chosen
    elif name == "measure":
        from megatron_rlzero.align.measure import measure as chosen
    elif name == "profile":
        from megatron_rlzero.align.profile import profile

        chosen = partial(profile, accepted=ledger.accepted)
    elif name == "check":
        from megatron_rlzero.align.check import check as chosen
    else:
        from megatron_rlzero.align.gradcheck import gradcheck as chosen
    return chosen


def checked(ledger: Ledger, model: Path) -> Path:
    """The model that the steps run: the proxy, or without one the model itself.

    Raises:
        ConfigError: it has no weights.
    """
    if ledger.passed("proxy"):
        return Path(ledger.steps["proxy"]["values"]["model"])
    if not any(model.glob("*.safetensors")):
        raise ConfigError([f"MODEL = {model}: no *.safetensors in it; take the step proxy first, which makes some"])
    return model


def configuration(parsed: Namespace, out: Path) -> Config:
    """The defaults with the model, its family and the overrides.

    Raises:
        ConfigError: they cannot run.
    """
    model = Path(parsed.model)
    if not (model / "config.json").is_file():
        raise ConfigError([f"MODEL = {model}: no config.json in it; give a Hugging Face directory"])
    given = [f"model.path={model}", f"run_dir={out}", "learner.world_size=1"]
    given += [f"model.family={parsed.family}"] if parsed.family else []
    with NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write("{}\n")
        file.flush()
        found = parse(file.name, [*given, *parsed.overrides])
    # of model and layout alone: there are neither prompts nor servers
    mine = ("model", "learner", "reduction_slices", "kernels", "rollout.tensor")
    violations = list(found.violations.values())
    faults = validate(found.config, starting=False, weights=False)
    if violations := violations or [fault for fault in faults if fault.startswith(mine)]:
        raise ConfigError(violations)
    return found.config


def _show(console: Console, outcome: Outcome) -> None:
    for line in outcome.lines:
        console.print(f"  {line}", highlight=False)
    for title, rows in outcome.tables.items():
        if len(rows) > ROWS:
            continue
        table = Table(*rows[0], title=title)
        for row in rows[1:]:
            table.add_row(*row)
        console.print(table)
