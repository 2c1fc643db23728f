"""``convert`` refuses what its direction does not have, and says which setting of config.json is wrong."""

import json

import pytest

from megatron_rlzero import cli
from megatron_rlzero.architectures.checkpoint_layout import smallest_world
from megatron_rlzero.convert import to_megatron


def refused(capsys, *arguments) -> list[str]:
    assert cli.main(["convert", *map(str, arguments)]) == 2
    return capsys.readouterr().err.strip().splitlines()


def test_options_of_the_other_direction(tmp_path, moe, capsys):
    to_megatron(moe, tmp_path / "megatron", smallest_world(1, 1, 1, 1))
    back = (tmp_path / "megatron", tmp_path / "back", "--to", "hf")
    lines = refused(capsys, *back, "--tensor-model-parallel-size", 2, "--naming", "gpt")
    assert [line.split(": ")[0] for line in lines] == ["--tensor-model-parallel-size = 2", "--naming = gpt"]
    (line,) = refused(capsys, moe, tmp_path / "other", "--to", "megatron", "--config", moe)
    assert line.startswith(f"--config = {moe}: of --to hf alone")
    assert not (tmp_path / "back").exists() and not (tmp_path / "other").exists()


def test_a_target_inside_the_source_or_half_written_by_its_name(tmp_path, moe, capsys):
    (line,) = refused(capsys, moe, moe / "deep" / "er", "--to", "megatron")
    assert "lies inside" in line
    (line,) = refused(capsys, moe, tmp_path / "x.partial", "--to", "megatron")
    assert "x.partial: names that end with .partial" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moe"]


def test_the_wrong_direction_is_guessed(tmp_path, moe, capsys):
    (line,) = refused(capsys, moe, tmp_path / "x", "--to", "hf")
    assert line.endswith("it is a Hugging Face directory: --to megatron")
    to_megatron(moe, tmp_path / "megatron", smallest_world(1, 1, 1, 1))
    (line,) = refused(capsys, tmp_path / "megatron", tmp_path / "x", "--to", "megatron")
    assert line.endswith("it is a Megatron checkpoint: --to hf")


@pytest.mark.parametrize("changes", [{"hidden_size": "64"}, {"num_hidden_layers": None}, {"num_hidden_layers": 0}])
def test_wrong_counts_of_config_json(tmp_path, moe, capsys, changes):
    path = moe / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (line,) = refused(capsys, moe, tmp_path / "x", "--to", "megatron")
    ((name, value),) = changes.items()
    assert f"config.json: {name} = {value!r}: not a positive integer" in line
    path.write_text("{")
    (line,) = refused(capsys, moe, tmp_path / "x", "--to", "megatron")
    assert "config.json is no JSON" in line


def test_a_misfit_size_is_one_line(tmp_path, moe, capsys):
    (line,) = refused(capsys, moe, tmp_path / "x", "--to", "megatron", "--tensor-model-parallel-size", 3)
    assert line.startswith("tensor_model_parallel_size = 3: ") and "more parameters" in line
