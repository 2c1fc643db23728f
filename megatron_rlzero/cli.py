"""The commands of megatron-rlzero, each a thin call into one module."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatron_rlzero.arguments import add_align, add_convert, port, positive

if TYPE_CHECKING:
    from megatron_rlzero.config import Config

#: exit code of a configuration that cannot run
INVALID = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code: 0, 1 after an error, 2 for an invalid configuration."""
    parser = argparse.ArgumentParser(prog="megatron-rlzero", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run, text in (
        ("train", train, "train a policy; under torchrun, as one of its ranks"),
        ("evaluate", evaluate, "held-out accuracy of model.path, sampled and greedy"),
        ("probe", probe, "compare log-probs of engine and learner at equal weights; exit code 1 if a token differs"),
    ):
        _add(commands, name, run, text)
    command = _add(commands, "generate", generate, "sample and grade the prompts of one update, with model.path")
    command.add_argument("--output", required=True, metavar="FILE", help="safetensors file to write, for replay")
    command.add_argument("--update", type=int, default=0, metavar="N", help="whose prompts (default 0)")
    command = _add(commands, "replay", replay, "train on recorded rollouts alone, without servers")
    command.add_argument("--rollouts", required=True, nargs="+", metavar="FILE", help="one update each, in order")
    command.add_argument("--checkpoint", metavar="DIR", help="a run's version-N to begin with (default: model.path)")
    command = _add(commands, "serve", serve, "one rollout server, for rollout.urls of a run or to join one")
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    command.add_argument("--port", type=port, default=8000)
    command.add_argument("--join", metavar="NAME", help="take part in the run in run_dir under this name, at once")
    command = commands.add_parser("plot", help="write plot.png of a run: reward, KL, lag")
    command.add_argument("run_dir")
    command.set_defaults(run=plot)
    add_convert(commands, convert)
    add_align(commands, align)
    command = commands.add_parser("theory", help="check what the importance weight promises, in numbers")
    command.add_argument("--plot", metavar="FILE", help="also draw the Gaussian model, as a PNG")
    command.set_defaults(run=theory)
    command = _add(commands, "estimate", estimate, "memory per rank and the refit's plan, from configurations alone")
    command.add_argument("--device-memory-gib", type=positive, default=80.0, help="of one device (default 80)")
    command.add_argument("--bandwidth-gib-s", type=positive, default=10.0, help="that one rank sends (default 10)")
    parsed, rest = parser.parse_known_args(arguments)
    # argparse takes no further positional after an option.
    if rest and (not hasattr(parsed, "overrides") or any(text.startswith("-") for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        parsed.overrides += rest
    from megatron_rlzero.launch import is_rank, launcher
    from megatron_rlzero.resharding.directories import CheckpointError
    from megatron_rlzero.validation import ConfigError
    from megatron_rlzero.watch import killed_with

    if is_rank():  # before the long imports: some catch a KeyboardInterrupt, and in a collective Python hears of none
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # servers and client end with rank 0
        killed_with(launcher())
    try:
        return parsed.run(parsed)
    except ConfigError as error:
        print("\n".join(error.violations), file=sys.stderr)
        return INVALID
    except CheckpointError as error:
        print("\n".join(error.faults), file=sys.stderr)
        return INVALID
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (RuntimeError, ArithmeticError, OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _add(commands: argparse._SubParsersAction, name: str, run: Callable, text: str) -> argparse.ArgumentParser:
    """A command that takes a configuration."""
    command = commands.add_parser(name, help=text)
    command.add_argument("config", help="YAML file")
    command.add_argument("overrides", nargs="*", metavar="a.b=c", help="values that replace those of the file")
    command.set_defaults(run=run)
    return command


def train(parsed: argparse.Namespace) -> int:
    """Checks everything, then starts the ranks; a rank runs its part."""
    from megatron_rlzero.launch import is_rank, launch, launched_here
    from megatron_rlzero.validation import load

    if is_rank():
        from megatron_rlzero.run import train as run

        # Under torchrun nobody has checked yet what has to hold before a start.
        first = os.environ["RANK"] == "0" and not launched_here()
        config = load(parsed.config, parsed.overrides, starting=first)
        run(config)
        if first:
            _finish(config)
        return 0
    config = load(parsed.config, parsed.overrides)
    code = launch(["-m", "megatron_rlzero", "train", parsed.config, *parsed.overrides], config.learner.world_size)
    if code == 128 + signal.SIGINT:
        print(f"interrupted; what there is lies in {config.run_dir}", file=sys.stderr)
    if code == 0:
        _finish(config)
    return code


def _finish(config: Config) -> None:
    from rich.console import Console

    from megatron_rlzero.plot import plot
    from megatron_rlzero.summary import summarise

    plot(config.run_dir)
    summarise(config, Console(soft_wrap=True))


def serve(parsed: argparse.Namespace) -> int:
    """Becomes the server, with the flags and the environment of one that a run starts itself."""
    from megatron_rlzero.generation import registry, server
    from megatron_rlzero.validation import ConfigError, is_loopback, load

    config = load(parsed.config, parsed.overrides, starting=False)
    if not is_loopback(parsed.host) and not config.rollout.token_file:
        raise ConfigError([f"--host = {parsed.host}: others can reach it; name a secret in rollout.token_file"])
    if parsed.join is not None:
        print(registry.register(config.run_dir, parsed.join, parsed.host, parsed.port))
    command = [sys.executable, "-m", server.MODULE, *server.flags(config, parsed.port, parsed.host)]
    os.execve(sys.executable, command, server.environment(config))


def probe(parsed: argparse.Namespace) -> int:
    """Prompts in pieces (chunked prefill) and cached prefixes, so that every path of the engine is compared."""
    from megatron_rlzero.launch import is_rank, launch
    from megatron_rlzero.validation import load

    # A directory of its own, and small steps: prompts come in pieces, and prefixes from the cache where that is exact.
    sequences = 32
    engine = f"{{max-num-seqs: {sequences}, max-num-batched-tokens: {sequences}}}"
    arguments = [parsed.config, f"rollout.engine_args={engine}", *parsed.overrides]
    if is_rank():
        from megatron_rlzero.run import run_probe

        return 1 if run_probe(load(arguments[0], arguments[1:], starting=False)) else 0
    given = load(arguments[0], arguments[1:], starting=False)
    arguments.append(f"run_dir={given.run_dir}/probe-{given.kernels}-{time.strftime('%Y%m%d-%H%M%S')}")
    config = load(arguments[0], arguments[1:])
    return launch(["-m", "megatron_rlzero", "probe", *arguments], config.learner.world_size)


def estimate(parsed: argparse.Namespace) -> int:
    """Exit code 1 where a rank does not fit into its device."""
    from megatron_rlzero.architectures import read_config
    from megatron_rlzero.estimate_report import report
    from megatron_rlzero.validation import load

    config = load(parsed.config, parsed.overrides, starting=False, weights=False)
    return 0 if report(config, read_config(config.model.path), parsed.device_memory_gib, parsed.bandwidth_gib_s) else 1


def evaluate(parsed: argparse.Namespace) -> int:
    """Starts servers on model.path and grades their responses to the held-out prompts."""
    import numpy as np

    from megatron_rlzero.generation.engine import RolloutEngine

    engine = RolloutEngine(_own_servers(parsed))
    try:
        engine.wait_ready()
        engine.label_weights(0)
        for greedy in (False, True):
            rollouts = engine.evaluate(greedy)
            accuracy = float(np.mean([r.reward for r in rollouts]))
            print(f"{'greedy' if greedy else 'sampled'} pass@1 {accuracy:.4f} over {len(rollouts)} prompts")
    finally:
        engine.close()
    return 0


def _own_servers(parsed: argparse.Namespace, updates: int | None = None) -> Config:
    """The configuration of a command whose servers hold model.path to its end; ``updates`` replaces the run's."""
    from megatron_rlzero.validation import ConfigError, load, validate

    config = load(parsed.config, parsed.overrides, starting=False)
    config.run_dir = f"{config.run_dir}/{parsed.command}-{time.strftime('%Y%m%d-%H%M%S')}"  # for the logs
    if urls := config.rollout.urls:
        raise ConfigError([f"rollout.urls = {urls}: they hold the weights of whichever run used them last; remove it"])
    config.rollout.max_restarts = 0  # one that was started again would have nobody to bring it the weights
    config.loop.updates = updates or config.loop.updates
    if violations := validate(config):
        raise ConfigError(violations)
    return config


def generate(parsed: argparse.Namespace) -> int:
    """Exactly what a run would sample for that update, if its weights were those of model.path."""
    from megatron_rlzero.generation.engine import RolloutEngine
    from megatron_rlzero.rollout_files import write_rollouts

    engine = RolloutEngine(_own_servers(parsed, updates=parsed.update + 1))
    try:
        engine.wait_ready()
        engine.label_weights(parsed.update)
        engine.set_version(parsed.update)
        rollouts = engine.take(parsed.update)
    finally:
        engine.close()
    write_rollouts(parsed.output, rollouts)
    reward = sum(r.reward for r in rollouts) / len(rollouts)
    print(f"{parsed.output}: {len(rollouts)} responses, mean reward {reward:.4f}")
    return 0


def replay(parsed: argparse.Namespace) -> int:
    """The policy after these updates lies in run_dir/policy."""
    from megatron_rlzero.launch import is_rank, launch
    from megatron_rlzero.run_directory import check_replay
    from megatron_rlzero.validation import ConfigError, load

    if is_rank():
        from megatron_rlzero.run import replay as run

        run(load(parsed.config, parsed.overrides, starting=False), parsed.rollouts, parsed.checkpoint)
        return 0
    config = load(parsed.config, parsed.overrides)
    if violations := check_replay(config, parsed.rollouts, parsed.checkpoint):
        raise ConfigError(violations)
    arguments = ["replay", parsed.config, *parsed.overrides, "--rollouts", *parsed.rollouts]
    arguments += ["--checkpoint", parsed.checkpoint] if parsed.checkpoint else []
    return launch(["-m", "megatron_rlzero", *arguments], config.learner.world_size)


def plot(parsed: argparse.Namespace) -> int:
    """Prints where the picture lies."""
    from megatron_rlzero.plot import plot as write

    print(write(parsed.run_dir))
    return 0


def theory(parsed: argparse.Namespace) -> int:
    """Prints the identities, the tree and the Gaussian model; 1 if an identity does not hold."""
    from megatron_rlzero.theory import draw, report

    lines, holds = report()
    print("\n".join(lines))
    if parsed.plot:
        print(draw(parsed.plot))
    return 0 if holds else 1


def align(parsed: argparse.Namespace) -> int:
    """Exit code 1 where a gate is not passed."""
    from megatron_rlzero.align.command import run

    return run(parsed)


def convert(parsed: argparse.Namespace) -> int:
    """Writes the target beside its place and moves it there when it is whole."""
    from megatron_rlzero.convert_command import run

    return run(parsed)
