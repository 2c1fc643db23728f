"""YAML file and ``a.b=c`` overrides to a Config: unknown keys, wrong types and missing values, all of them found.

What cannot be used is listed and replaced by its default, so that the rest can still be checked. A violation is one
line ``key = value: what is wrong; fix``.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_rlzero.architectures import add, language_settings, routed_experts
from megatron_rlzero.config import Config

NAMES = {int: "an integer", float: "a number", str: "a text", bool: "true or false", list: "a list", dict: "a mapping"}


@dataclass
class Parsed:
    """The configuration as far as it could be read; ``violations`` by key, all of them with a default in place."""

    config: Config = field(default_factory=Config)
    violations: dict[str, str] = field(default_factory=dict)


def line(key: str, value: Any, problem: str, fix: str) -> str:
    """One violation as one line; long values are cut."""
    text = "null" if value is None else " ".join(str(value).split())
    text = text if len(text) <= 100 else text[:97] + "..."
    return f"{key} = {text}: {problem}; {fix}"


def parse(path: str | Path, overrides: Sequence[str] = ()) -> Parsed:
    """Reads ``path``, then the overrides in their order; a later good value mends an earlier bad one."""
    tree: DictConfig = OmegaConf.structured(Config)
    parsed = Parsed()
    sources = [_read_file(path, parsed.violations)]
    sources += [_read_override(override, parsed.violations) for override in overrides]
    for source in sources:
        for key, value, hint in _leaves(source, Config, "", parsed.violations):
            _set(tree, key, value, hint, parsed.violations)
    for key, hint in _schema(Config):
        _resolve(tree, key, hint, parsed.violations)
    parsed.config = OmegaConf.to_object(tree)
    if parsed.config.model.family:
        try:
            add(parsed.config.model.family)
        except ValueError as error:
            parsed.violations["model.family"] = f"{error}; name a file as docs/adding_an_architecture.md says"
    if parsed.config.learner.expert_model_parallel_size is None:
        parsed.config.learner.expert_model_parallel_size = _expert_parallel(parsed.config)
    return parsed


def _expert_parallel(config: Config) -> int:
    """The largest size that divides both the ranks of a pipeline stage and the experts; 1 where either is unknown."""
    world, stages = config.learner.world_size, config.learner.pipeline_model_parallel_size
    path = Path(config.model.path, "config.json")
    if stages < 1 or world < 1 or world % stages or not path.is_file():
        return 1
    try:
        hf = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # preflight.py says what is wrong with it
        return 1
    experts = routed_experts(language_settings(hf)) if isinstance(hf, dict) else 0
    return math.gcd(world // stages, experts or 1)


def _read_file(path: str | Path, violations: dict[str, str]) -> Any:
    try:
        content = OmegaConf.load(path)
    except OSError as error:
        violations["config"] = line("config", path, str(error.strerror), "give a YAML file that can be read")
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        violations["config"] = line("config", path, f"not YAML: {_one_line(error)}", "correct it")
    else:
        if isinstance(content, DictConfig):
            return OmegaConf.to_container(content)
        violations["config"] = line("config", path, "not a mapping", "start with key: value lines")
    return {}


def _read_override(override: str, violations: dict[str, str]) -> Any:
    key, equals, value = override.partition("=")
    if not equals or not all(key.split(".")):
        violations[override] = f"{override}: not an override; write section.key=value"
        return {}
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([override]))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        violations[key] = line(key, value, f"not YAML: {_one_line(error)}", "quote it or correct it")
        return {}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _leaves(node: Mapping, schema: type, prefix: str, violations: dict[str, str]) -> Iterator[tuple[str, Any, Any]]:
    """(key, value, type) of what is set under ``node``; unknown keys and sections that are none go to violations."""
    hints = get_type_hints(schema)
    for name, value in node.items():
        key = f"{prefix}{name}"
        if name not in hints:
            near = difflib.get_close_matches(str(name), hints, n=1)
            fix = f"did you mean {prefix}{near[0]}?" if near else f"known here: {', '.join(hints)}"
            violations[key] = line(key, value, "unknown key", fix)
        elif not is_dataclass(hints[name]):
            yield key, value, hints[name]
        elif isinstance(value, Mapping):
            yield from _leaves(value, hints[name], f"{key}.", violations)
        else:
            violations[key] = line(key, value, "not a section", "write its keys below it, indented")


def _schema(schema: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key, type) of every leaf of the tree."""
    hints = get_type_hints(schema)
    for entry in fields(schema):
        hint = hints[entry.name]
        if is_dataclass(hint):
            yield from _schema(hint, f"{prefix}{entry.name}.")
        else:
            yield f"{prefix}{entry.name}", hint


def _set(tree: DictConfig, key: str, value: Any, hint: Any, violations: dict[str, str]) -> None:
    try:
        OmegaConf.update(tree, key, value)
    except OmegaConfBaseException:
        default = _default(key)
        example = "" if default in (None, "", "???") else f", such as {default}"
        violations[key] = line(key, value, f"not {_describe(hint)}", f"write {_describe(hint)}{example}")
    else:
        violations.pop(key, None)


def _resolve(tree: DictConfig, key: str, hint: Any, violations: dict[str, str]) -> None:
    """Puts the value of an interpolation in its place, and a stand-in where a mandatory value is missing."""
    parent, _, name = key.rpartition(".")
    if OmegaConf.is_missing(OmegaConf.select(tree, parent) if parent else tree, name):
        violations.setdefault(key, line(key, "???", "missing", f"write {_describe(hint)}; it has no default"))
        OmegaConf.update(tree, key, "")
        return
    try:
        value = OmegaConf.select(tree, key)
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
        OmegaConf.update(tree, key, value, merge=False)
    except OmegaConfBaseException as error:
        raw = OmegaConf.to_container(tree)
        for part in key.split("."):
            raw = raw[part]
        problem = _one_line(error).split(" full_key")[0]
        violations[key] = line(key, raw, problem, "give a fitting value or refer to a key that has one")
        default = _default(key)
        OmegaConf.update(tree, key, "" if default == "???" else default, merge=False)


def _default(key: str) -> Any:
    """The default of a leaf; "???" where it is mandatory."""
    node = OmegaConf.to_container(OmegaConf.structured(Config))
    for part in key.split("."):
        node = node[part]
    return node


def _describe(hint: Any) -> str:
    if isinstance(hint, UnionType):
        return " or ".join("null" if part is type(None) else NAMES[part] for part in get_args(hint))
    return NAMES[get_origin(hint) or hint]


class Findings:
    """The violations of a configuration so far, and the keys whose values are no good for further checks."""

    def __init__(self, parsed: Parsed) -> None:
        self.config = parsed.config
        self.lines = list(parsed.violations.values())
        self.bad = set(parsed.violations)

    def usable(self, *keys: str) -> bool:
        """Whether the values of all ``keys`` stand, so that a check of them together makes sense."""
        return self.bad.isdisjoint(keys)

    def value(self, key: str) -> Any:
        node: Any = self.config
        for part in key.split("."):
            node = getattr(node, part)
        return node

    def add(self, key: str, problem: str, fix: str) -> None:
        """A fault of how the value goes with others; the value itself stands."""
        self.lines.append(line(key, self.value(key), problem, fix))

    def reject(self, key: str, problem: str, fix: str) -> None:
        """A fault of the value itself: later checks leave it out."""
        self.add(key, problem, fix)
        self.bad.add(key)
