"""Speed and memory of ``convert`` on a random checkpoint, against ``cp`` in the same run.

    .venv/bin/python tools/bench_convert.py [--gib 2.5] [--rounds 3] [--directory DIR]

Every round copies the Hugging Face directory with ``cp -r``, converts it to a distributed checkpoint and converts that
back. Before each of the three all dirty pages are written, the source is read once, and as much memory as it takes is
used and freed, so that all begin alike: a virtual machine's host may have taken back what was free, and is slow to give
it again. ``cp`` ends when its data are in the page cache, ``convert`` when they are on the disk: the second column of
ratios is against a copy that waits for the disk too. Memory is the largest RssAnon of the converting process, sampled
every 10 ms, above that after its imports; processor time is of all its threads.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MIB = 2**20
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 32001,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 16,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def make_checkpoint(directory: Path, gib: float) -> dict[str, int]:
    """Random bf16 weights of at least ``gib`` GiB; bytes of all tensors and of the largest."""
    import torch

    from megatron_rlzero.architectures import architecture
    from megatron_rlzero.resharding.layout import Box
    from megatron_rlzero.resharding.safetensors_files import SafetensorsWriter, Spec

    layers, size = 0, 0
    while size < gib * 2**30:
        layers += 1
        hf = CONFIG | {"num_hidden_layers": layers}
        shapes = architecture(hf).tensors(hf)
        size = sum(2 * Box.whole(shape).numel for shape in shapes.values())
    directory.mkdir()
    writer = SafetensorsWriter(directory, {n: Spec(s, torch.bfloat16) for n, s in shapes.items()})
    block = torch.randn(max(Box.whole(shape).numel for shape in shapes.values())).bfloat16()
    for name, shape in shapes.items():
        writer.write(name, Box.whole(shape), block[: Box.whole(shape).numel].view(shape))
    writer.close()
    (directory / "config.json").write_text(json.dumps(hf))
    return {"bytes": size, "largest": 2 * len(block)}


def anonymous(process: int | str = "self") -> int:
    """Bytes of a process's memory that no file stands behind; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def child(to: str, source: str, target: str, tensor_parallel: int) -> None:
    """Converts, and prints seconds, and the memory before, as JSON."""
    from megatron_rlzero.architectures.checkpoint_layout import smallest_world
    from megatron_rlzero.convert import to_hf, to_megatron

    before = anonymous()
    start, used = time.perf_counter(), sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    if to == "megatron":
        to_megatron(source, target, smallest_world(tensor_parallel, 1, 2, 1))
    else:
        to_hf(source, target)
    seconds = time.perf_counter() - start
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - used
    print(json.dumps({"seconds": seconds, "cpu": used, "before": before}))


def converted(arguments: list[str]) -> dict[str, float]:
    """What ``child`` prints, and the most memory that it had above that before; sampled from outside, every 10 ms."""
    process = subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE)
    peak = 0
    while process.poll() is None:
        peak = max(peak, anonymous(process.pid))
        time.sleep(0.01)
    if process.returncode:
        raise SystemExit(process.returncode)
    result = json.loads(process.stdout.read())
    return result | {"memory": max(peak - result["before"], 0)}


def settle(source: Path) -> None:
    """All dirty pages on the disk, the source in the page cache, memory for a copy of it at hand."""
    os.sync()
    files = [file for file in source.rglob("*") if file.is_file()]
    for file in files:
        with open(file, "rb") as f:
            while f.read(16 * MIB):
                pass
    bytearray(b"x") * sum(file.stat().st_size for file in files)


def copy(source: Path, target: Path) -> tuple[float, float, float]:
    """Seconds of ``cp -r``, until the copy is on the disk, and of its processor time."""
    start, used = time.perf_counter(), sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    subprocess.run(["cp", "-r", source, target], check=True)
    copied = time.perf_counter() - start
    used = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - used
    for file in target.rglob("*"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return copied, time.perf_counter() - start, used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tensor-parallel", type=int, default=2, help="of the distributed checkpoint")
    parser.add_argument("--directory", help="where to work; the system's temporary directory by default")
    parser.add_argument("--child", nargs=3, metavar=("TO", "SOURCE", "TARGET"), help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.child:
        child(*parsed.child, parsed.tensor_parallel)
        return
    with tempfile.TemporaryDirectory(dir=parsed.directory) as directory:
        hf, megatron = Path(directory) / "hf", Path(directory) / "megatron"
        sizes = make_checkpoint(hf, parsed.gib)
        seconds: dict[str, list[float]] = {}
        processor: dict[str, list[float]] = {}
        memory: dict[str, int] = {}
        for _ in range(parsed.rounds):
            settle(hf)
            copied, synced, used = copy(hf, Path(directory) / "copy")
            shutil.rmtree(Path(directory) / "copy")
            seconds.setdefault("cp -r", []).append(copied)
            seconds.setdefault("cp -r, on disk", []).append(synced)
            processor.setdefault("cp -r", []).append(used)
            shutil.rmtree(megatron, ignore_errors=True)
            for name, to, source, target in (
                ("HF to Megatron", "megatron", hf, megatron),
                ("Megatron to HF", "hf", megatron, Path(directory) / "back"),
            ):
                settle(source)
                layout = ["--tensor-parallel", str(parsed.tensor_parallel)]
                result = converted([*layout, "--child", to, str(source), str(target)])
                seconds.setdefault(name, []).append(result["seconds"])
                processor.setdefault(name, []).append(result["cpu"])
                memory[name] = max(memory.get(name, 0), result["memory"])
            shutil.rmtree(Path(directory) / "back")
    limit = 2 * sizes["largest"] + 512 * MIB
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{sizes['bytes']:,} bytes, largest tensor {sizes['largest']:,}; {os.cpu_count()} cores, load {load}")
    plain, synced = (statistics.median(seconds[name]) for name in ("cp -r", "cp -r, on disk"))
    for name, times in seconds.items():
        median = statistics.median(times)
        spread = f"{min(times):.2f} to {max(times):.2f} s"
        line = f"{name:16} {sizes['bytes'] / median / 1e9:6.2f} GB/s  ({spread})"
        line += f"  ratio to cp {plain / median:5.2f}, to cp on disk {synced / median:5.2f}"
        line += f", best to best {min(seconds['cp -r']) / min(times):5.2f}"
        if name in processor:
            line += f"  processor {statistics.median(processor[name]):5.2f} s"
        if name in memory:
            line += f"  memory {memory[name] / MIB:6.0f} MiB of {limit / MIB:.0f}"
        print(line)


if __name__ == "__main__":
    main()
