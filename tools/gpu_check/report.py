"""Results as JSON, as tables in Markdown, and as a line each while they come in."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Result = dict[str, Any]
VERDICTS = {True: "ok", False: "FAILED", None: "skipped"}


def line(result: Result) -> str:
    """One result in one line."""
    name = " ".join(filter(None, (result["part"], result["name"], result["dtype"])))
    text = f"{VERDICTS[result['ok']]:8}{name:58}{result['seconds']:6.1f} s  "
    if result["error"]:
        return text + result["error"].strip().splitlines()[-1]
    return text + "; ".join(filter(None, map(_short, result["checks"])))


def passed(results: Sequence[Result]) -> bool:
    """Whether there are checks, and each was made and passed; times that were skipped do not count."""
    checks = [result for result in results if result["part"] in ("operators", "invariance")]
    return bool(checks) and all(r["ok"] for r in checks) and all(r["ok"] is not False for r in results)


def write(directory: Path, results: Sequence[Result], settings: dict[str, Any]) -> None:
    """results.json and results.md, also while some are missing."""
    skipped = [f"{r['part']}: {r['name']} {r['dtype']}".strip() for r in results if r["ok"] is None]
    found = {"ok": passed(results), "settings": settings, "skipped": skipped, "results": list(results)}
    (directory / "results.json").write_text(json.dumps(_valid(found), indent=1, allow_nan=False))
    (directory / "results.md").write_text("\n".join(_markdown(results, skipped)) + "\n")


def _valid(found: Any) -> Any:
    """JSON has no infinity and no NaN: they become strings."""
    if isinstance(found, dict):
        return {key: _valid(value) for key, value in found.items()}
    if isinstance(found, list):
        return list(map(_valid, found))
    return str(found) if isinstance(found, float) and not math.isfinite(found) else found


def _markdown(results: Sequence[Result], skipped: list[str]) -> list[str]:
    lines = [f"# {'Passed' if passed(results) else 'NOT passed'}", ""]
    for result in results:
        if result["part"] == "environment" and result["checks"]:
            about = {key: value for key, value in result["checks"][0].items() if key != "tiles"}
            lines += [", ".join(f"{key} {value}" for key, value in about.items()), "", "Tiles:", ""]
            for name, tile in result["checks"][0]["tiles"].items():
                lines.append(f"- {name}: {', '.join(f'{key} {value}' for key, value in tile.items() if value)}")
            lines.append("")
    lines += ["## Values and gradients against float64", "", "| operator | dtype | largest error | tolerance | |"]
    lines += ["|---|---|---|---|---|"]
    for result in (r for r in results if r["part"] == "operators"):
        errors = [check["error"] for check in result["checks"]]
        limit = f"{result['checks'][0]['tolerance']:.1e}" if errors else ""
        worst = f"{max(errors):.1e}" if errors else "none"
        lines.append(f"| {result['name']} | {result['dtype']} | {worst} | {limit} | {VERDICTS[result['ok']]} |")
    lines += ["", "## Bits", "", "| operator | dtype | what | comparisons | differ | control noticed | |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for result in (r for r in results if r["part"] == "invariance"):
        head = f"| {result['name']} | {result['dtype']} |"
        for check in result["checks"]:
            numbers = (check["what"], check["compared"], check["differing"], check["control"])
            verdict = "for comparison" if check["ok"] is None else VERDICTS[check["ok"]]
            lines.append(f"{head} {' | '.join(map(str, numbers))} | {verdict} |")
        if not result["checks"]:
            lines.append(f"{head} | | | | {VERDICTS[result['ok']]} |")
    lines += _times(results)
    wrong = [result for result in results if result["error"]]
    if wrong:
        lines += ["", "## Errors", ""]
        lines += [f"{r['part']}, {r['name']} {r['dtype']}:\n```\n{r['error'].strip()}\n```" for r in wrong]
    if skipped:
        lines += ["", "## Skipped", "", *(f"- {name}" for name in skipped)]
    return lines


def _times(results: Sequence[Result]) -> list[str]:
    """Of the limit: the time that bytes or FLOPs take at the rates measured, over the time taken."""
    timed = [result for result in results if result["part"] == "times" and result["checks"]]
    limits = next((check for r in timed for check in r["checks"] if check["what"] == "limits"), None)
    if limits is None:
        return []
    bandwidth, rate = limits["bytes_per_second"], limits["flops_per_second"]
    lines = ["", "## Times", "", f"Measured: {_limits(limits)}.", ""]
    lines += ["| operator | pass | ms | of the limit | torch's | torch's ms | ratio | host ms |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for result in timed:
        for check in (check for check in result["checks"] if check["what"] != "limits"):
            least = 1e3 * max(check["bytes"] / bandwidth, check["flops"] / rate)
            library = check.get("library", {})
            theirs = library.get("ms")
            beside = ["", "", ""] if not library else [library["name"], "failed", ""]
            if theirs:
                beside[1:] = [f"{theirs:.3f}", f"{check['ms'] / theirs:.2f}"]
            own = [result["name"], check["what"], f"{check['ms']:.3f}", f"{least / check['ms']:.0%}"]
            lines.append(f"| {' | '.join([*own, *beside, format(check['host_ms'], '.3f')])} |")
    return lines


def _limits(check: dict[str, Any]) -> str:
    bandwidth, rate = check["bytes_per_second"], check["flops_per_second"]
    return f"a copy {bandwidth / 1e12:.2f} TB/s, a bf16 product {rate / 1e12:.0f} TFLOP/s"


def _short(check: dict[str, Any]) -> str:
    if "tolerance" in check:
        return f"{check['what']} {check['error']:.1e}"
    if "compared" in check:
        beside = "" if check["ok"] is None else f", control {check['control']}"
        first = f" ({', '.join(check['first'])})" if check["differing"] and check["ok"] is False else ""
        return f"{check['what']}: {check['differing']} of {check['compared']} differ{first}{beside}"
    if "ms" in check:
        library = check.get("library", {})
        beside = f", torch {library['ms']:.3f}" if "ms" in library else ""
        return f"{check['what']} {check['ms']:.3f} ms{beside}"
    if check.get("what") == "limits":
        return _limits(check)
    return ", ".join(f"{key} {value}" for key, value in check.items() if key != "tiles")
