"""Targets of ``convert`` are whole or absent: files in the way, kills, full disks, several processes."""

import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from megatron_rlzero import cli
from megatron_rlzero.convert import to_hf
from megatron_rlzero.launch import launch
from megatron_rlzero.resharding.directories import CheckpointError, staged
from tests.checkpoints import changed, read, same_bits

GATE = "model.layers.1.mlp.experts.2.gate_proj.weight"
UP = "model.layers.1.mlp.experts.2.up_proj.weight"


def test_a_target_with_files_is_left_alone(tmp_path, moe, capsys):
    target = tmp_path / "target"
    target.mkdir()
    (target / "mine").write_text("text")
    assert cli.main(["convert", str(moe), str(target), "--to", "megatron"]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert [p.name for p in target.iterdir()] == ["mine"]
    (target / "mine").unlink()
    assert cli.main(["convert", str(moe), str(target), "--to", "megatron"]) == 0


KILLED = """
import os, signal, sys
from megatron_rlzero import cli, convert
from megatron_rlzero.resharding.{module} import {writer} as writer
write, count = writer.write, 0
def killed(*arguments):
    global count
    count += 1
    if count == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    write(*arguments)
writer.write = killed
cli.main(["convert", *sys.argv[1:]])
"""


@pytest.mark.parametrize("to", ["megatron", "hf"])
def test_a_killed_conversion_is_never_taken_for_whole(tmp_path, moe, megatron, capsys, to):
    source, target = {"megatron": moe, "hf": megatron}[to], tmp_path / "target"
    module, writer = {
        "megatron": ("torch_dist_writer", "TorchDistWriter"),
        "hf": ("safetensors_files", "SafetensorsWriter"),
    }[to]
    script = KILLED.format(module=module, writer=writer)
    run = subprocess.run([sys.executable, "-c", script, source, target, "--to", to], check=False, timeout=120.0)
    assert run.returncode == -signal.SIGKILL
    partial = tmp_path / "target.partial"
    assert partial.is_dir() and not target.exists()
    refuse, back = ("hf", "megatron") if to == "megatron" else ("megatron", "hf")
    assert cli.main(["convert", str(partial), str(tmp_path / "x"), "--to", refuse]) == 2
    assert "half written" in capsys.readouterr().err
    shutil.copytree(partial, tmp_path / "renamed")  # under an innocent name the marker is missing
    assert cli.main(["convert", str(tmp_path / "renamed"), str(tmp_path / "x"), "--to", refuse]) == 2
    assert ("no metadata.json" if to == "megatron" else "no config.json") in capsys.readouterr().err
    assert cli.main(["convert", str(source), str(target), "--to", back]) == 0
    assert target.is_dir() and not partial.exists()


def test_two_conversions_do_not_share_a_directory(tmp_path):
    with staged(tmp_path / "target") as partial, pytest.raises(CheckpointError, match="another process is writing"):
        (partial / "file").write_text("")
        with staged(tmp_path / "target"):
            pass
    assert (tmp_path / "target" / "file").is_file()


def test_a_disk_that_is_full_says_so(tmp_path, moe, monkeypatch, capsys):
    def full(file, offset, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    assert cli.main(["convert", str(moe), str(tmp_path / "target"), "--to", "megatron"]) == 1
    assert re.search(r"the disk is full: __0_0.distcp needs [\d,]+ bytes, [\d,]+ are", capsys.readouterr().err)
    assert not (tmp_path / "target").exists() and not (tmp_path / "target.partial").exists()


@pytest.mark.parametrize("to", ["megatron", pytest.param("hf", marks=pytest.mark.full)])
def test_several_processes_write_what_one_does(tmp_path, moe, megatron, to):
    """The files are the same, but for the order in which the index lists their contents."""
    source = {"megatron": moe, "hf": megatron}[to]
    arguments = ["-m", "megatron_rlzero", "convert", str(source), str(tmp_path / "target"), "--to", to]
    if to == "megatron":
        arguments += ["--tensor-model-parallel-size", "2", "--expert-model-parallel-size", "2"]
    assert launch(arguments, 3 if to == "hf" else 2) == 0
    if to == "hf":
        assert same_bits(read(tmp_path / "target"), read(moe))
        return
    for file in megatron.glob("*.distcp"):
        assert (tmp_path / "target" / file.name).read_bytes() == file.read_bytes()
    to_hf(tmp_path / "target", tmp_path / "back")
    assert same_bits(read(tmp_path / "back"), read(moe))


@pytest.mark.full
def test_a_fault_of_one_of_several_processes(tmp_path, moe, capfd):
    last = changed(moe, lambda t: t["model.layers.2.mlp.experts.5.down_proj.weight"].fill_(torch.nan))
    sizes = ["--tensor-model-parallel-size", "2", "--expert-model-parallel-size", "2"]
    arguments = ["-m", "megatron_rlzero", "convert", str(last), str(tmp_path / "target"), "--to", "megatron", *sizes]
    assert launch(arguments, 2) == 2
    assert "experts.5.down_proj.weight: NaN or infinity" in capfd.readouterr().err
    assert not (tmp_path / "target").exists()
