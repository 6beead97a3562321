"""Checkpoints: what was written comes back, a stranger can decode it, and no damaged or unfinished folder loads."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedweight.bitplane import dequantize, pack_codes
from pagedweight.checkpoint import Checkpoint, CheckpointError, CheckpointWriter
from pagedweight.layout import BlockId, Layout, MoeLayer, PackedBlock, Projection
from pagedweight.quant.codebooks import fit_table

CODEBOOKS = {2: "lut8", 3: "lut16", 5: "cubic", 6: "affine"}
LAYOUT = Layout((MoeLayer(1, 2, 40, 11), MoeLayer(4, 3, 5, 33, "gelu_tanh")), (2, 3, 5, 6), CODEBOOKS)
SHARD_BYTES = 5000


def make_block(shape: tuple[int, int], layout: Layout, seed: int) -> PackedBlock:
    """Random codes and fitted tables of random values."""
    rows, columns = shape
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << layout.parent_width, shape, dtype=torch.uint8, generator=generator)
    tables = {
        bits: fit_table(
            layout.codebooks[bits],
            torch.ones(rows, 1 << bits, dtype=torch.float64),
            torch.randn(rows, 1 << bits, generator=generator, dtype=torch.float64).sort(dim=1).values,
        )
        for bits in layout.widths
    }
    return PackedBlock(pack_codes(codes, layout.parent_width), tables, columns)


BLOCKS = {
    block: make_block(shape, LAYOUT, seed)
    for seed, (block, shape) in enumerate(zip(LAYOUT.blocks(), LAYOUT.row_shapes(), strict=True))
}


def write(directory: Path, count: int = LAYOUT.rows) -> CheckpointWriter:
    writer = CheckpointWriter(directory, LAYOUT, shard_bytes=SHARD_BYTES)
    for block in list(LAYOUT.blocks())[:count]:
        writer.add(block, BLOCKS[block])
    return writer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished checkpoint of several shards."""
    write(tmp_path).finish()
    names = sorted(path.name for path in (tmp_path / "pagedweight").iterdir())
    assert names[0] == "metadata.json"
    assert len(names) >= 4
    assert all(name.startswith("pages-") for name in names[1:])
    return tmp_path


def shard(folder: Path, number: int) -> Path:
    return folder / "pagedweight" / f"pages-{number:05d}.safetensors"


def edit_metadata(folder: Path, change: dict) -> None:
    path = folder / "pagedweight" / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "pagedweight").iterdir())}


def same(left: PackedBlock, right: PackedBlock) -> bool:
    return (
        torch.equal(left.planes, right.planes)
        and left.columns == right.columns
        and left.tables.keys() == right.tables.keys()
        and all(torch.equal(left.tables[b], right.tables[b]) for b in left.tables)
        and all(left.tables[b].dtype == right.tables[b].dtype for b in left.tables)
    )


def test_every_block_comes_back_whole_and_page_by_page(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    checkpoint.verify()
    assert checkpoint.layout == LAYOUT
    for block, packed in BLOCKS.items():
        assert same(checkpoint.block(block), packed)
        assert torch.equal(checkpoint.plane(block, 2), packed.planes[2])
        assert torch.equal(checkpoint.table(block, 5), packed.tables[5])


def test_a_block_outside_the_layout_is_a_key_error(folder: Path) -> None:
    with pytest.raises(KeyError, match=r"layers\.2\.experts\.0\.down is not in the layout"):
        Checkpoint.open(folder).block(BlockId(2, 0, Projection.DOWN))


def test_the_same_blocks_give_the_same_bytes(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("again")
    write(other).finish()
    assert contents(folder) == contents(other)


def decode_by_the_document(folder: Path, block: str, bits: int, row: int, column: int) -> float:
    """One weight from the files alone: docs/format.md, in plain Python."""
    pages = folder / "pagedweight"
    metadata = json.loads((pages / "metadata.json").read_text(encoding="utf-8"))
    tensors = {}
    for record in metadata["shards"]:
        data = (pages / record["file"]).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8 : 8 + length]).items():
            begin, end = entry["data_offsets"]
            tensors[name] = (entry["dtype"], entry["shape"], data[8 + length + begin : 8 + length + end])

    def element(name: str, *index: int) -> float:
        dtype, shape, data = tensors[f"{block}.{name}"]
        letter, size = {"U32": ("I", 4), "F16": ("e", 2), "U8": ("B", 1), "F32": ("f", 4)}[dtype]
        position = 0
        for length, i in zip(shape, index, strict=True):
            position = position * length + i
        return struct.unpack(f"<{letter}", data[position * size : (position + 1) * size])[0]

    code = 0
    for plane in range(bits):
        code = 2 * code + (element(f"plane{plane}", row, column // 32) >> (column % 32)) % 2
    half = 2 ** (bits - 1)
    match metadata["codebooks"][str(bits)]:
        case "lut16":
            return element(f"lut{bits}", row, code)
        case "lut8":
            return element(f"scale{bits}", row) * (element(f"lut{bits}", row, code) - 64)
        case "cubic":
            v = (code - half) / half
            c3, c2, c1, c0 = (element(f"coef{bits}", row, i) for i in range(4))
            return ((c3 * v + c2) * v + c1) * v + c0
        case "affine":
            return element(f"scale{bits}", row, 0) * (code + 0.5 - half) + element(f"scale{bits}", row, 1)


@pytest.mark.parametrize("bits", LAYOUT.widths)
def test_a_stranger_can_decode_the_files_from_the_document(folder: Path, bits: int) -> None:
    generator = np.random.default_rng(bits)
    for block, packed in BLOCKS.items():
        weights = dequantize(packed, bits)
        for _ in range(4):
            row, column = (int(generator.integers(size)) for size in weights.shape)
            decoded = decode_by_the_document(folder, str(block), bits, row, column)
            assert decoded == pytest.approx(float(weights[row, column]), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("count", [0, 1, LAYOUT.rows - 1, LAYOUT.rows])
def test_an_unfinished_folder_never_loads(tmp_path: Path, count: int) -> None:
    writer = write(tmp_path, count)
    with pytest.raises(CheckpointError, match=r"has no metadata\.json"):
        Checkpoint.open(tmp_path)
    if count < LAYOUT.rows:
        with pytest.raises(ValueError, match=f"{count} of {LAYOUT.rows} linear-blocks are written"):
            writer.finish()


def test_writing_over_a_checkpoint_takes_the_old_one_away_first(folder: Path) -> None:
    write(folder, 2)
    with pytest.raises(CheckpointError, match=r"has no metadata\.json"):
        Checkpoint.open(folder)
    write(folder).finish()
    Checkpoint.open(folder).verify()


def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    killed = tmp_path_factory.mktemp("killed")
    write(killed, LAYOUT.rows - 3)  # never finished
    (killed / "pagedweight" / "pages-00009.safetensors.tmp").write_bytes(b"half a shard")
    writer = CheckpointWriter(killed, LAYOUT, shard_bytes=SHARD_BYTES, resume=True)
    assert 0 < writer.next_row <= LAYOUT.rows - 3
    for block in list(LAYOUT.blocks())[writer.next_row :]:
        writer.add(block, BLOCKS[block])
    writer.finish()
    assert contents(killed) == contents(folder)


def test_a_killed_run_over_another_layout_or_with_a_damaged_shard_starts_again(tmp_path: Path) -> None:
    write(tmp_path, LAYOUT.rows - 1)
    shard(tmp_path, 1).write_bytes(b"damaged")
    assert CheckpointWriter(tmp_path, LAYOUT, resume=True).next_row == 0
    write(tmp_path, LAYOUT.rows - 1)
    narrower = Layout(LAYOUT.moe_layers, (3, 5), CODEBOOKS)
    assert CheckpointWriter(tmp_path, narrower, resume=True).next_row == 0


def test_a_run_by_another_recipe_starts_again_and_the_same_one_has_its_damage_back(tmp_path: Path) -> None:
    def writer(recipe: dict[str, str]) -> CheckpointWriter:
        return CheckpointWriter(tmp_path, LAYOUT, shard_bytes=SHARD_BYTES, resume=True, recipe=recipe)

    first = writer({"level": "best"})
    for row, block in enumerate(list(LAYOUT.blocks())[:-1]):
        first.add(block, BLOCKS[block], [row + bits / 10 for bits in LAYOUT.widths])
    first.close()
    again = writer({"level": "best"})
    assert again.next_row >= 2
    assert again.s_bar == [[row + bits / 10 for bits in LAYOUT.widths] for row in range(again.next_row)]
    for block in list(LAYOUT.blocks())[again.next_row :]:
        again.add(block, BLOCKS[block])
    again.finish()
    assert Checkpoint.open(tmp_path).recipe == {"level": "best"}
    assert "s_bar" not in json.loads((tmp_path / "pagedweight" / "metadata.json").read_text())
    assert writer({"level": "fast"}).next_row == 0


def test_nothing_but_a_shard_that_is_written_is_in_memory(tmp_path: Path) -> None:
    """Linear-blocks go to disk as they come, into a file that has no name of a shard yet."""
    writer = CheckpointWriter(tmp_path, LAYOUT)
    unfinished = tmp_path / "pagedweight" / "pages-00001.safetensors.tmp"
    for block in list(LAYOUT.blocks())[:-1]:
        writer.add(block, BLOCKS[block])
    assert not shard(tmp_path, 1).exists()
    writer.close()
    planes = sum(packed.planes.nbytes for packed in list(BLOCKS.values())[:-1])
    assert unfinished.stat().st_size > planes


def test_blocks_are_taken_in_row_order_and_only_if_they_fit(tmp_path: Path) -> None:
    first, second = list(LAYOUT.blocks())[:2]
    writer = CheckpointWriter(tmp_path, LAYOUT)
    with pytest.raises(ValueError, match=f"the next linear-block in row order is {first}"):
        writer.add(second, BLOCKS[second])
    with pytest.raises(ValueError, match=f"{first} does not fit the layout"):
        writer.add(first, BLOCKS[second])
    with pytest.raises(ValueError, match=r"no table of \[3, 6\] bits"):
        writer.add(first, BLOCKS[first]._replace(tables={b: BLOCKS[first].tables[b] for b in (2, 5)}))
    writer.add(first, BLOCKS[first])
    assert writer.next_row == 1


def test_case_104_a_truncated_shard_is_named_with_both_sizes(folder: Path) -> None:
    path = shard(folder, 2)
    whole = path.read_bytes()
    for kept in (len(whole) - 100, 60, 5, 0):
        path.write_bytes(whole[:kept])
        with pytest.raises(CheckpointError, match=f"{path.name}.* has {kept} bytes and should have {len(whole)}"):
            Checkpoint.open(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path.name} is missing; it should have {len(whole)} bytes"):
        Checkpoint.open(folder)


def test_case_104_swapped_shards_are_told_by_their_names(folder: Path) -> None:
    one, two = shard(folder, 1), shard(folder, 2)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    with pytest.raises(CheckpointError, match=f"{one.name} holds the tensors of {two.name}; the files were swapped"):
        Checkpoint.open(folder)


def test_case_104_no_flipped_header_byte_passes(folder: Path) -> None:
    path = shard(folder, 1)
    whole = path.read_bytes()
    header_bytes = 8 + int.from_bytes(whole[:8], "little")
    for position in [*range(10), *range(10, header_bytes, 97), header_bytes - 1]:
        flipped = bytearray(whole)
        flipped[position] ^= 0x04
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match="pagedweight"):
            Checkpoint.open(folder)


def test_a_flipped_data_byte_is_found_by_verify(folder: Path) -> None:
    path = shard(folder, 3)
    flipped = bytearray(path.read_bytes())
    flipped[-1] ^= 1
    path.write_bytes(flipped)
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(CheckpointError, match=f"{path.name} is damaged: its checksum differs"):
        checkpoint.verify()


def test_case_105_renamed_deleted_and_added_tensors_are_listed(folder: Path) -> None:
    path = shard(folder, 1)
    tensors = load_file(path)
    del tensors["layers.1.experts.0.down.plane0"]
    tensors["layers.1.experts.0.gate_up.lut_3"] = tensors.pop("layers.1.experts.0.gate_up.lut3")
    tensors["extra"] = torch.zeros(1)
    save_file(tensors, path)
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(folder)
    for problem in (
        "missing layers.1.experts.0.down.plane0",
        "missing layers.1.experts.0.gate_up.lut3",
        "unexpected layers.1.experts.0.gate_up.lut_3",
        "unexpected extra",
    ):
        assert problem in str(error.value)


def test_wrong_shapes_and_dtypes_are_named(folder: Path) -> None:
    path = shard(folder, 1)
    tensors = load_file(path)
    tensors["layers.1.experts.0.down.plane0"] = tensors["layers.1.experts.0.down.plane0"].view(torch.int32)
    tensors["layers.1.experts.0.gate_up.lut3"] = tensors["layers.1.experts.0.gate_up.lut3"][:-1]
    save_file(tensors, path)
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(folder)
    assert "down.plane0 is I32 [40, 1], not U32 [40, 1]" in str(error.value)
    assert "gate_up.lut3 is F16 [21, 8], not F16 [22, 8]" in str(error.value)


def test_case_109_an_unknown_field_is_a_warning(folder: Path) -> None:
    document = json.loads((folder / "pagedweight" / "metadata.json").read_text())
    layers = [layer | {"bar": 2} for layer in document["layers"]]
    edit_metadata(folder, {"foo": 1, "layers": layers})
    with pytest.warns(UserWarning, match="does not know: (foo|bar)") as caught:
        checkpoint = Checkpoint.open(folder)
    assert {"foo", "bar"} == {str(warning.message).rsplit(": ")[-1] for warning in caught}
    assert checkpoint.layout == LAYOUT


def test_another_version_is_refused_with_the_wanted_one(folder: Path) -> None:
    edit_metadata(folder, {"version": 2})
    with pytest.raises(CheckpointError, match="version 2; this release reads pagedweight version 1"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"widths": [2, 3]},
        {"widths": "2356"},
        {"codebooks": {"2": "lut16"}},
        {"layers": []},
        {"layers": [{"layer": 1, "experts": 2, "hidden": "40", "intermediate": 11}]},
        {"layers": 3},
        {"shards": []},
    ],
    ids=lambda change: str(change)[:40],
)
def test_metadata_that_does_not_match_the_files_is_refused(folder: Path, change: dict) -> None:
    edit_metadata(folder, change)
    with pytest.raises(CheckpointError, match="pagedweight"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("value", [40.0, "40", True, None])
def test_a_number_of_the_wrong_type_is_refused(folder: Path, value: object) -> None:
    document = json.loads((folder / "pagedweight" / "metadata.json").read_text())
    document["layers"][0]["hidden"] = value
    edit_metadata(folder, document)
    with pytest.raises(CheckpointError, match=f"hidden is {value!r}; wanted int"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "name", ["../pages-00001.safetensors", "/etc/passwd", "pages-00001.safetensors/..", "model.bin"]
)
def test_no_path_leaves_the_folder(folder: Path, name: str) -> None:
    document = json.loads((folder / "pagedweight" / "metadata.json").read_text())
    document["shards"][0]["file"] = name
    edit_metadata(folder, document)
    with pytest.raises(CheckpointError, match="a shard is named"):
        Checkpoint.open(folder)


def test_metadata_that_is_no_json_is_refused(folder: Path) -> None:
    for text in ("", "[]", "{", '{"format": "pagedweight"}', "\udcff"):
        (folder / "pagedweight" / "metadata.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(CheckpointError, match=r"metadata\.json is damaged"):
            Checkpoint.open(folder)


def test_a_folder_without_pages_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no folder .*nowhere; quantize the model into it first"):
        Checkpoint.open(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="as a dense model has none; quantize the model into another folder"):
        Checkpoint.open(tmp_path)
