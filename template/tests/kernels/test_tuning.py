"""Tiles: the static table, the file of measured entries, and the command that writes it."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from curry_train.kernels import tuning
from curry_train.kernels.tuning import (
    BUCKETS,
    DTYPES,
    KERNELS,
    SHARED_BYTES,
    Tile,
    bank_products,
    block_m_for,
    candidates,
    find_tile,
    table_tile,
)

CPU = torch.device("cpu")
KEY = ("gmm", "sm_90", torch.bfloat16, 64, 2048, 768)
NAME = "gmm/sm_90/bf16/64/2048x768"


@pytest.fixture
def tiles(tmp_path, monkeypatch):
    """A file that does not exist yet, in the place of tiles.json."""
    path = tmp_path / "tiles.json"
    monkeypatch.setenv(tuning.FILE_VARIABLE, str(path))
    tuning.read_tiles.cache_clear()
    tuning.tile_for.cache_clear()
    yield path
    tuning.read_tiles.cache_clear()
    tuning.tile_for.cache_clear()


def keys():
    return itertools.product(KERNELS, [*SHARED_BYTES, "sm_75"], DTYPES, BUCKETS)


def test_every_tile_of_the_table_fits():
    for kernel, arch, dtype, block_m in keys():
        tile = table_tile(kernel, arch, dtype, block_m)
        stages = (tile.block_m + tile.block_n) * tile.block_k * dtype.itemsize * tile.num_stages
        room = SHARED_BYTES.get(arch, 65_536)
        assert 0 < stages <= room, (kernel, arch, dtype, tile)
        assert all(n & (n - 1) == 0 for n in tile[:4]), tile
        assert kernel == "gmm_wgrad" or tile.block_m == block_m


def test_every_candidate_fits_and_there_are_few():
    for kernel, arch, dtype, block_m in keys():
        found = list(candidates(kernel, arch, dtype, block_m))
        assert found[0] == table_tile(kernel, arch, dtype, block_m)
        assert len(set(found)) == len(found) <= 19, (kernel, arch, dtype, block_m)
        for tile in found:
            stages = (tile.block_m + tile.block_n) * tile.block_k * dtype.itemsize
            assert stages * tile.num_stages <= SHARED_BYTES.get(arch, 65_536)


def test_the_bucket_holds_the_mean_expert():
    assert [block_m_for(rows, 4) for rows in (0, 64, 65, 128, 132, 256, 260, 10**6)] == [
        16, 16, 32, 32, 64, 64, 128, 128,
    ]  # fmt: skip
    # Twice the tokens change nothing once tiles are full.
    assert block_m_for(65_536, 128) == block_m_for(262_144, 128) == 128


def test_the_source_of_a_tile(tiles):
    assert find_tile(*KEY) == (table_tile(*KEY[:4]), "table")
    assert find_tile("gmm", "sm_75", *KEY[2:])[1] == "default"
    wanted = Tile(64, 256, 32, 8, 3, 4)
    tuning.write_tiles(tiles, {NAME: {"tile": wanted._asdict(), "microseconds": 3.5}})
    assert find_tile(*KEY) == (wanted, "tuned")
    # Another size of the weight, dtype, bucket or kernel is another entry.
    assert find_tile(*KEY[:5], 769)[1] == find_tile(*KEY[:3], 128, *KEY[4:])[1] == "table"
    assert find_tile("gmm_wgrad", *KEY[1:])[1] == "table"


def test_writing_keeps_the_other_entries(tiles):
    tile = {"tile": Tile(64, 128, 64, 8, 3)._asdict()}
    tuning.write_tiles(tiles, {NAME: tile, "gmm/sm_90/bf16/64/8x8": tile})
    tuning.write_tiles(tiles, {NAME: {"tile": Tile(64, 256, 64, 8, 3)._asdict()}})
    entries = json.loads(tiles.read_text())["tiles"]
    assert {key: entry["tile"]["block_n"] for key, entry in entries.items()} == {
        NAME: 256,
        "gmm/sm_90/bf16/64/8x8": 128,
    }
    assert [path.name for path in tiles.parent.iterdir()] == ["tiles.json"]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "Expecting"),
        ("[]", "list"),
        ('{"tiles": {"gmm/a/bf16/64/1x1": {"tile": {"block_m": 64}}}}', "block_n"),
        (
            json.dumps({"tiles": {NAME: {"tile": Tile(64, 96, 64, 4, 3)._asdict()}}}),
            "powers of two",
        ),
        (json.dumps({"tiles": {NAME: {"tile": Tile(32, 64, 64, 4, 3)._asdict()}}}), "bucket 64"),
        (json.dumps({"tiles": {NAME: {"tile": Tile(64, 64, 64, 4, 0)._asdict()}}}), NAME),
    ],
)
def test_a_file_that_holds_no_tiles_is_named(tiles, text, word):
    tiles.write_text(text)
    with pytest.raises(ValueError, match="write it again") as caught:
        find_tile(*KEY)
    assert str(tiles) in str(caught.value) and word in str(caught.value)


def test_the_command_refuses_a_machine_without_gpu(tiles, capsys):
    assert tuning.main([]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and "no GPU" in error
    assert not tiles.exists()


def clock(fastest: Tile):
    """Return a clock on which one tile is fast; the call is `functools.partial(..., tile=tile)`."""
    return lambda call: 1e-6 if call.keywords["tile"] == fastest else 2e-6


def test_the_fastest_tile_is_written_and_used(tiles):
    products = bank_products(8, 8, 8, 2, 1, dtype=torch.float32, device=CPU, block_m=16)
    fastest = Tile(16, 64, 32, 4, 2, 2)
    entries = tuning.tune(products[1:2], "interpreter", torch.float32, 16, clock(fastest))
    assert entries == {
        "gmm/interpreter/fp32/16/8x8": {"tile": fastest._asdict(), "microseconds": 1.0}
    }
    assert tuning.tile_for("gmm", CPU, torch.float32, 16, 8, 8) != fastest
    tuning.write_tiles(tiles, entries)
    assert tuning.tile_for("gmm", CPU, torch.float32, 16, 8, 8) == fastest


def test_a_tile_that_fails_or_computes_wrongly_is_passed_over(capsys):
    bad, wrong = Tile(16, 64, 32, 4, 2, 2), Tile(16, 64, 32, 4, 3, 2)

    def call(*, tile):
        if tile == bad:
            raise RuntimeError("out of resource: shared memory")
        return (torch.ones(4), torch.full((4,), 1.0 + (tile == wrong)))

    product = bank_products(8, 8, 8, 2, 1, dtype=torch.float32, device=CPU, block_m=16)[1]
    for tile in (bad, wrong):
        found = tuning.tune(
            [product._replace(call=call)], "interpreter", torch.float32, 16, clock(tile)
        )
        (entry,) = found.values()
        assert Tile(**entry["tile"]) not in (bad, wrong)
    error = capsys.readouterr().err
    assert f"{bad}: RuntimeError" in error and f"{wrong}: wrong values" in error
    with pytest.raises(RuntimeError, match="no tile could be compiled"):
        broken = product._replace(call=lambda *, tile: 1 / 0)
        tuning.tune([broken], "interpreter", torch.float32, 16, clock(bad))


def test_the_products_of_a_bank_are_all_six():
    products = bank_products(8, 6, 4, 2, 2, dtype=torch.float32, device=CPU, block_m=16)
    sizes = {product.name: (product.kernel, product.N, product.K) for product in products}
    assert sizes == {
        "gate_up": ("gmm_swiglu", 8, 6),
        "down": ("gmm", 6, 4),
        "down_dgrad": ("gmm_dswiglu", 4, 6),
        "down_wgrad": ("gmm_wgrad", 6, 4),
        "gate_up_dgrad": ("gmm", 6, 8),
        "gate_up_wgrad": ("gmm_wgrad", 8, 6),
    }
    for product in products:
        found = product.call(tile=None)
        first = found if isinstance(found, torch.Tensor) else found[0]
        # Pairs of gate and up: the gradient of h is twice as wide as the product.
        assert first.shape[1] == product.N * (2 if product.kernel == "gmm_dswiglu" else 1)
