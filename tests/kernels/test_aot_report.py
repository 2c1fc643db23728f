"""The arithmetic of the report on compiled kernels, by hand: occupancy, bytes, FLOPs, and the bounds that follow."""

import csv

import pytest

from tools import aot_report
from tools.aot import Compiled
from tools.occupancy import occupancy
from tools.published import MODELS
from tools.roofline import attention, models, operators, report, scan
from tools.roofline.launch import TILES, Launch, cost, passed
from tools.tables import cells


@pytest.mark.parametrize(
    ("capability", "registers", "warps", "shared", "columns", "programs", "limit"),
    [
        # 221 -> 224 registers a thread, 7,168 a warp: nine warps in 65,536
        (90, 221, 8, 98_304, 0, 1, "registers"),
        # 168 a thread, 5,376 a warp: twelve warps
        (80, 168, 4, 4_096, 0, 3, "registers"),
        (80, 169, 4, 4_096, 0, 2, "registers"),
        # 96 KiB and 1 KiB of the system: twice into 228, once into 164
        (90, 64, 4, 96 << 10, 0, 2, "shared memory"),
        (80, 64, 4, 96 << 10, 0, 1, "shared memory"),
        # one byte more than a third of 228 KiB, less the system's, takes a unit of 128
        (90, 64, 4, 75 << 10, 0, 3, "shared memory"),
        (90, 64, 4, (75 << 10) + 1, 0, 2, "shared memory"),
        (100, 64, 4, 0, 256, 2, "tensor memory"),
        (90, 16, 4, 0, 0, 16, "warps"),
        (90, 32, 32, 0, 0, 2, "registers"),
        (80, 16, 4, 200 << 10, 0, 0, "shared memory"),
    ],
)
def test_occupancy(capability, registers, warps, shared, columns, programs, limit):
    found = occupancy(capability, registers, warps, shared, columns)
    assert found == (programs, programs * warps / 64, limit)


def test_a_product():
    """100 x 200 by 200 x 300: bf16 tiles of 128 x 128 x 64 are 128 x 256 x 384 in all."""
    assert (TILES.product.m, TILES.product.n, TILES.product.k) == (128, 128, 64)
    found = operators.product(100, 300, 200)
    assert found.bytes == 2 * (100 * 200 + 200 * 300 + 100 * 300)
    assert found.matrix == 2 * 128 * 384 * 256
    assert found.filled == 2 * 100 * 200 * 300
    assert found.fp32 == 0
    wide = operators.product(100, 300, 200, batch=2, element=4, out=4)
    assert wide.bytes == 2 * 4 * (100 * 200 + 200 * 300 + 100 * 300)
    assert (wide.matrix, wide.filled) == (0, 2 * found.filled)
    assert wide.fp32 >= wide.filled


def test_experts_read_each_weight_once_and_pad_their_rows():
    """16 rows for 4 experts: four tiles of 128 rows."""
    (forward,), (to_x, to_weights) = operators.grouped_linear(16, 4, n=256, k=64)
    assert forward.bytes == 2 * (16 * 64 + 16 * 256 + 4 * 256 * 64)
    assert forward.matrix == 2 * 4 * 128 * 256 * 64
    assert forward.filled == to_x.filled == to_weights.filled == 2 * 16 * 256 * 64
    assert to_weights.matrix == 2 * 4 * 256 * 128 * 64
    (fewer,), _ = operators.grouped_linear(16, 4, n=256, k=64, x=2)
    assert forward.bytes - fewer.bytes == 2 * 14 * 64


def test_slices_go_through_memory():
    """t = 128, n = 128, k = 256 in 4 slices: fp32 partial results written, read by the tree, its root, the rounding."""
    parts, tree, rounding = operators.sliced_product(128, 128, 256, 4)
    numbers = 128 * 128
    assert parts.bytes == 2 * (2 * 128 * 256) + 4 * 4 * numbers
    assert tree.bytes == 4 * 5 * numbers
    assert rounding.bytes == 6 * numbers
    assert len(operators.sliced_product(128, 128, 256, 4, blocks=5)) == 4
    # 100 rows: 64 at a time, then two
    assert [launch.bytes for launch in operators.tree(100, 1)] == [4 * 102, 4 * 3]
    assert operators.tree(1, 7) == []


def test_attention():
    """One document of 64 tokens, one head: a tile of queries, one of keys, two products forward and seven backward."""
    assert {TILES.attention.m, TILES.attention.n, TILES.attention_backward.m, TILES.attention_backward.n} == {64}
    (forward,), backward = attention.attention([64], 1, 1, 128)
    assert forward.bytes == 4 * 64 * 128 * 2 + 64 * 4
    assert forward.matrix == 4 * 64 * 64 * 128
    assert forward.filled == 4 * (64 * 65 // 2) * 128
    assert [launch.matrix for launch in backward] == [0, 8 * 64 * 64 * 128, 6 * 64 * 64 * 128]
    # twice as long: of four tiles three are computed
    (longer,), (_, to_keys, to_queries) = attention.attention([128], 1, 1, 128)
    assert longer.matrix == 3 * forward.matrix
    assert (to_keys.matrix, to_queries.matrix) == (3 * 8 * 64 * 64 * 128, 3 * 6 * 64 * 64 * 128)
    # other documents are not seen
    assert cost(attention.attention([64, 64], 1, 1, 128)[0]).matrix == 2 * forward.matrix
    # eight heads of one KV head share its keys: eight times the rows, of which a tile has eight tokens
    (shared,), _ = attention.attention([64], 8, 1, 128)
    assert (shared.matrix, shared.filled) == (8 * forward.matrix, 8 * forward.filled)
    assert shared.bytes == 2 * (8 + 1) * 64 * 128 * 2 + 8 * 64 * 4


def test_decoding_reads_the_cache_once():
    zeros, stored, attend = attention.decode(2, 512, heads=8, kv_heads=2, dim=128)
    assert zeros.bytes == 2 * 2 * 8 * 128
    assert stored.bytes == 2 * 2 * 2 * 2 * 2 * 128
    assert attend.bytes == 2 * (2 * 8 * 128 + 2 * 2 * 512 * 2 * 128) + 2 * 2 * 8 * 128 + 4 * 2 * 8
    assert attend.matrix == 2 * 2 * 64 * 512 * 4 * 128  # four rows in a tile of 64
    assert cost([attend]).filled == 4 / 64


def test_the_head_is_read_for_every_chunk_of_rows():
    rows = operators.chunks(2000, 151_936)
    assert rows == [880, 880, 240]
    forward, backward = operators.log_prob(2000, 2048, 151_936, 4)
    head = 151_936 * 2048
    assert cost(forward).bytes > len(rows) * 2 * head
    # logits again and the gradient of hidden states read it; its own gradient is written, read, and added in fp32
    assert cost(backward).bytes > len(rows) * (2 * 2 + 4 * 4) * head
    assert sum(launch.filled for launch in (*forward, *backward)) == 4 * 2 * 2000 * head


def test_the_scan():
    """One chunk of one head with a state of 64 x 128: two tiles of channels."""
    assert (TILES.scan.m, TILES.scan.n) == (32, 32)
    (forward,), backward = scan.scan([32], 1, 64, 1, 128)
    assert forward.matrix == 2 * (2 * 32 * 32 * 128)
    assert forward.fp32 == 2 * (2 * 32 * 64 * 128) + 2 * 32 * 32 * 64
    assert cost([forward]).filled == 1
    state = 4 * 64 * 128
    assert [launch.bytes > n * state for launch, n in zip(backward, (1, 1, 2, 2), strict=True)] == [True] * 4
    (step, _) = scan.decode(1, 1, 64, 1, 128)
    assert cost([step]).filled == 1 / 32
    assert state < step.bytes < 1.5 * state


def test_a_bound_is_the_slowest_part():
    assert cost([Launch(4.8e12, matrix=989e12 / 2, fp32=67e12 / 4)]).bound == "memory"
    found = cost([Launch(4.8e12), Launch(0, matrix=3 * 989e12, filled=989e12), Launch(0, fp32=67e12, filled=67e12)])
    assert (found.bound, found.seconds) == ("matrix units", pytest.approx(5))
    assert found.filled == (989e12 + 67e12) / (3 * 989e12 + 67e12)
    assert found.intensity == (3 * 989e12 + 67e12) / 4.8e12
    assert cost([passed(67e12 / 2, 0.001, 0.001, steps=1)]).seconds == pytest.approx(1)


def test_a_decode_step_reads_every_weight_once():
    """Qwen3-30B-A3B has 30,532,122,624 parameters, among them an input embedding that is looked up."""
    weights = 2 * (30_532_122_624 - 151_936 * 2048)
    step = models.decode("Qwen3-30B-A3B", 64, 1)
    assert weights < sum(x.count * cost(x.forward).bytes for x in step) < 1.1 * weights
    # a cache of 4,096 keys: 48 layers, 4 KV heads of 128, keys and values
    longer = models.decode("Qwen3-30B-A3B", 64, 4097)
    more = sum(x.count * (cost(x.forward).bytes - cost(y.forward).bytes) for x, y in zip(longer, step, strict=True))
    cache = 64 * 48 * 4096 * 4 * 128 * 2 * 2
    assert cache <= more < 1.05 * cache


def test_layers_of_the_hybrid():
    counts = {x.name: x.count for x in models.learner("Nemotron-3-Nano-30B-A3B", [64])}
    assert (counts["scan"], counts["attention"], counts["combine"]) == (23, 6, 23)
    assert counts["norm of the hidden state"] == 53
    assert "rotary" not in counts


def test_tables(tmp_path):
    """Of specialisations the worst is shown; what both dtypes share is one row; the page says what it is."""
    small, large = (Compiled("product.product", 90, "M=128", n, 0, 98_304, 8, "wgmma") for n in (100, 221))
    kernels = [aot_report.Kernel("linear", d, x, 0, 3) for d in ("bf16", "fp32") for x in (small, large)]
    (row,) = aot_report.summarised(kernels)
    assert (row.dtype, row.found, row.occupancy.programs) == ("both", large, 1)
    assert len(row.cells()) == len(aot_report.HEADER)
    (other,) = cells([row.cells()], aot_report.HEADER.index(aot_report.SHARE))
    assert other[4:] == ["221", "0", "96", "3", "wgmma", "1", "12.5%", "registers"]
    assert cells([[0.0, "", 1234.5, 0.0125, 7]], 3) == [["-", "-", "1,234", "1.25%", "7"]]
    page = report.page()
    assert "no GPU ran any of it" in page
    for model in MODELS:
        assert page.count(f"### {model}") == 2
    assert all(len(line) == len(report.HEADER) for line in report.rows(models.decode("Qwen3-30B-A3B", 64, 1)))
    path = tmp_path / "rows.csv"
    aot_report.write_csv(path, aot_report.HEADER, [row.cells()])
    assert list(csv.reader(path.open()))[1][4] == "221"
