"""Reading and writing checkpoint files: what is refused, what is kept, what is left behind."""

import json
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffusion_core.errors import CheckpointError, CorruptFileError, MissingFileError
from diffusion_core.hub import WeightFiles, find_weights, read_index
from diffusion_core.offload.checkpoint import Checkpoint, TensorFile, is_finite, is_remote, read_header
from diffusion_core.offload.dtypes import parse_dtype
from diffusion_core.offload.saving import save_tensors

NAME = "diffusion_pytorch_model"
SINGLE = f"{NAME}.safetensors"
INDEX = f"{SINGLE}.index.json"


def tensors(count: int = 4) -> dict[str, torch.Tensor]:
    return {f"layer.{number}.weight": torch.randn(8, 4) for number in range(count)}


def raw_file(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, shape: tuple[int, ...] = (2,), dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def opened(folder: Path, **options: object) -> Checkpoint:
    return Checkpoint(find_weights(folder), **options)  # type: ignore[arg-type]


# Case 26: files that are not what their names say.
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["0 bytes", "empty"]),
        (b"abcdef", ["6 bytes", "too few"]),
        (b"<!DOCTYPE html><html><body>Log in</body></html>", ["web page", "47 bytes"]),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", ["git-lfs pointer", "git lfs pull"]),
        (b"PK\x03\x04" + b"\0" * 60, ["torch.load", "use_safetensors=False"]),
        (b"GGUF" + b"\1" * 60, ["GGUF"]),
        (b'{"error": "Repository not found"}', ["JSON text", "33 bytes"]),
        (b"\xff" * 64, ["announces a header of"]),
    ],
)
def test_a_file_that_is_no_safetensors_is_named_with_size_and_cause(tmp_path, content, words):
    path = tmp_path / SINGLE
    path.write_bytes(content)
    with pytest.raises(CorruptFileError) as caught:
        opened(tmp_path)
    for word in [str(path), str(len(content)), *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(("cut", "cause"), [(-5, "cut off"), (3, "behind the weights")])
def test_a_truncated_file_or_one_with_trailing_bytes_tells_the_expected_size(tmp_path, cut, cause):
    path = save_tensors(tensors(), tmp_path)[0]
    whole = path.read_bytes()
    path.write_bytes(whole[:cut] if cut < 0 else whole + b"x" * cut)
    with pytest.raises(CorruptFileError, match=cause) as caught:
        read_header(path)
    assert f"has {len(whole) + cut} bytes" in str(caught.value)
    assert f"says {len(whole)}" in str(caught.value)


def test_a_file_cut_inside_its_header_says_how_much_is_missing(tmp_path):
    path = save_tensors(tensors(), tmp_path)[0]
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(CorruptFileError, match=r"\(40 bytes\) announces a header of \d+ bytes.*cut off"):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b'{"a": 1', "broken safetensors header"),
        (b"[1, 2, 3]  ", "not a JSON object"),
        (b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}',
         "'a' occurs twice"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, "'b' at bytes 4 to 12 overlaps"),
        ({"a": entry(0, 8), "b": entry(12, 20)}, "'b' at bytes 12 to 20 leaves a gap"),
        ({"a": entry(8, 16)}, "leaves a gap"),
        ({"a": entry(0, 8, dtype="F31")}, "dtype 'F31'"),
        ({"a": entry(0, 8, dtype=7)}, "dtype 7"),
        ({"a": entry(0, 8, shape=(-2,))}, "shape"),
        ({"a": entry(0, 8, shape=(2.0,))}, "shape"),
        ({"a": entry(0, 8, shape=(3,))}, "needs 12 bytes"),
        ({"a": entry(0, 8, shape=(2**62, 2**62))}, "needs"),
        ({"a": entry(8, 0)}, "not a begin and an end"),
        ({"a": {**entry(0, 8), "data_offsets": [0, 8, 9]}}, "not a begin and an end"),
        ({"a": {"dtype": "F32"}}, "does not consist of"),
        ({"a": [1]}, "does not consist of"),
        ({"__metadata__": {"a": 1}}, "not texts"),
        ({"__metadata__": [1]}, "not an object"),
        (b"[" * 5000 + b"]" * 5000, "broken safetensors header"),
        (b'{"\xff": 1}', "broken safetensors header"),
    ],
)  # fmt: skip
def test_a_broken_header_is_explained(tmp_path, header, message):
    path = raw_file(tmp_path / SINGLE, header, b"\0" * 20)
    with pytest.raises(CorruptFileError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_what_safetensors_writes_is_read_and_the_other_way_round(tmp_path):
    every = {
        name: torch.randint(0, 100, (3, 5)).to(dtype)
        for name, dtype in {
            "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
            "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8,
            "bool": torch.bool, "f8": torch.float8_e4m3fn, "f8b": torch.float8_e5m2,
        }.items()
    }  # fmt: skip
    every |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(3.5)}
    save_file(every, tmp_path / SINGLE, metadata={"format": "pt"})
    theirs = TensorFile(tmp_path / SINGLE)
    ours = load_file(save_tensors(every, tmp_path / "ours")[0])
    assert theirs.keys() == ours.keys() == every.keys()
    for name, tensor in every.items():
        for other in (theirs[name], ours[name], theirs.read(name)):
            assert other.dtype == tensor.dtype and other.shape == tensor.shape
            assert torch.equal(other.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


def test_mapped_tensors_cost_no_copy_and_never_change_the_file(tmp_path):
    path = save_tensors(tensors(), tmp_path)[0]
    before = path.read_bytes()
    file = TensorFile(path)
    first = file["layer.0.weight"]
    assert first.data_ptr() == file["layer.0.weight"].data_ptr()
    file.close()
    first.fill_(7)
    assert (first == 7).all() and path.read_bytes() == before
    copy = TensorFile(path, disable_mmap=True)
    assert copy["layer.0.weight"].data_ptr() != copy["layer.0.weight"].data_ptr()


def test_tensors_that_are_not_aligned_are_read(tmp_path):
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}} '
    path = raw_file(
        tmp_path / SINGLE, header + b" " * ((1 - len(header)) % 4), torch.tensor([1.5, 2.5]).numpy().tobytes()
    )
    assert read_header(path).data_start % 4
    assert TensorFile(path)["a"].tolist() == [1.5, 2.5]


# Case 35: mapped files are slow or hang on network and user-space mounts.
def test_files_on_network_and_fuse_mounts_are_read_not_mapped(tmp_path, monkeypatch):
    line = "36 25 0:32 / {point} rw,noatime - {kind} server:/x rw"
    table = [
        ("/", "ext4"),
        ("/mnt/net", "nfs4"),
        ("/mnt/net/disk", "xfs"),
        ("/mnt/a\\040b", "fuse.sshfs"),
        ("/mnt/c", "9p"),
    ]
    mounts = "\n".join(line.format(point=point, kind=kind) for point, kind in table) + "\nodd line\n"
    answers = {
        "/home/x.safetensors": False, "/mnt/net/x": True, "/mnt/net/disk/x": False, "/mnt/a b/x": True,
        "/mnt/c/x": True, "/mnt/network/x": False,
    }  # fmt: skip
    assert {path: is_remote(path, mounts) for path in answers} == answers
    assert not is_remote(tmp_path)
    path = save_tensors(tensors(), tmp_path)[0]
    monkeypatch.setattr("diffusion_core.offload.checkpoint.is_remote", lambda path: True)
    file = TensorFile(path)
    assert file["layer.0.weight"].data_ptr() != file["layer.0.weight"].data_ptr()


# Cases 22, 23 and what an index may and may not say.
def sharded(folder: Path) -> tuple[dict[str, torch.Tensor], list[Path]]:
    content = tensors(6)
    return content, save_tensors(content, folder, max_shard_size=2 * 8 * 4 * 4)


def test_shards_and_index_are_those_of_the_reference(tmp_path):
    content, files = sharded(tmp_path)
    assert [path.name for path in files] == [f"{NAME}-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": 6 * 8 * 4 * 4}
    assert set(index["weight_map"]) == set(content)
    with opened(tmp_path) as checkpoint:
        assert all(torch.equal(checkpoint[name], tensor) for name, tensor in content.items())
        assert checkpoint.nbytes() == 6 * 8 * 4 * 4


def test_all_missing_shards_are_listed_in_one_error(tmp_path):
    _, files = sharded(tmp_path)
    files[0].unlink()
    files[2].unlink()
    with pytest.raises(MissingFileError, match=f"{files[0].name}, {files[2].name}"):
        opened(tmp_path)


def test_a_stale_index_gives_way_to_the_single_file(tmp_path, caplog):
    content, files = sharded(tmp_path)
    for path in files:
        path.unlink()
    save_file(content, tmp_path / SINGLE)
    with opened(tmp_path) as checkpoint:
        assert set(checkpoint) == set(content)
    assert "names files that are absent" in caplog.text


def test_left_over_files_are_ignored(tmp_path):
    content, _ = sharded(tmp_path)
    save_file({"old": torch.ones(1)}, tmp_path / f"{NAME}-00004-of-00004.safetensors")
    with opened(tmp_path) as checkpoint:
        assert set(checkpoint) == set(content)


def test_a_shard_that_lacks_a_promised_tensor_is_an_error_naming_it(tmp_path):
    _, files = sharded(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["ghost.weight"] = files[1].name
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CorruptFileError, match=rf"{files[1].name} lacks 1 tensors.*ghost\.weight"):
        opened(tmp_path)


def test_an_index_without_metadata_works(tmp_path):
    content, _ = sharded(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    del index["metadata"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with opened(tmp_path) as checkpoint:
        assert set(checkpoint) == set(content)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"weight_map": {"a": "../../x.safetensors"}}', "not the plain name"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "not the plain name"),
        ('{"weight_map": {"a": "..\\\\x.safetensors"}}', "not the plain name"),
        ('{"weight_map": {"a": ".."}}', "not the plain name"),
        ('{"weight_map": {"a": 5}}', "not the plain name"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "'a' occurs twice"),
        ('{"weight_map": {}}', "no filled object"),
        ('{"weight_map": [1]}', "no filled object"),
        ("[]", "no filled object"),
        ("{", "not a shard index"),
        ("<html></html>", "web page"),
    ],
)
def test_a_bad_index_is_refused_by_name(tmp_path, text, message):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CorruptFileError, match=message) as caught:
        read_index(tmp_path / INDEX)
    assert INDEX in str(caught.value)


# Case 19: a save removes exactly its own stale files.
def test_saving_again_leaves_only_what_belongs_together(tmp_path):
    content = tensors(6)
    bystanders = {
        "notes.txt",
        f"{NAME}.fp16.safetensors",
        f"{NAME}.bin",
        f"{NAME}_ema.safetensors",
        "other-00001-of-00002.safetensors",
    }
    for name in bystanders:
        (tmp_path / name).write_text("x")
    sharded(tmp_path)
    save_tensors(content, tmp_path)
    assert names(tmp_path) == bystanders | {SINGLE}
    sharded(tmp_path)
    save_tensors(content, tmp_path, max_shard_size=3 * 128)
    assert names(tmp_path) == bystanders | {
        INDEX,
        f"{NAME}-00001-of-00002.safetensors",
        f"{NAME}-00002-of-00002.safetensors",
    }
    with opened(tmp_path) as checkpoint:
        assert all(torch.equal(checkpoint[name], tensor) for name, tensor in content.items())


def test_variants_live_side_by_side(tmp_path):
    plain, half = tensors(), {name: tensor.half() for name, tensor in tensors().items()}
    save_tensors(plain, tmp_path)
    save_tensors(half, tmp_path, variant="fp16", max_shard_size=64)
    assert f"{NAME}.fp16-00001-of-00004.safetensors" in names(tmp_path)
    assert f"{NAME}.safetensors.index.fp16.json" in names(tmp_path)
    assert {info.dtype for info in Checkpoint(find_weights(tmp_path, variant="fp16")).infos.values()} == {torch.float16}
    save_tensors(half, tmp_path, variant="fp16")
    assert names(tmp_path) == {SINGLE, f"{NAME}.fp16.safetensors"}
    with pytest.raises(MissingFileError, match=r"bf16.*it holds.*Without variant='bf16'"):
        find_weights(tmp_path, variant="bf16")


def test_the_older_layout_of_sharded_variants_is_read_and_cleaned_up(tmp_path):
    content = tensors(2)
    weight_map = {}
    for number, (name, tensor) in enumerate(content.items(), 1):
        shard = f"{NAME}-0000{number}-of-00002.fp16.safetensors"
        save_file({name: tensor}, tmp_path / shard)
        weight_map[name] = shard
    (tmp_path / f"{NAME}.safetensors.fp16.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with Checkpoint(find_weights(tmp_path, variant="fp16")) as checkpoint:
        assert set(checkpoint) == set(content)
    save_tensors(content, tmp_path, variant="fp16")
    assert names(tmp_path) == {f"{NAME}.fp16.safetensors"}


def test_saving_over_the_mapped_files_is_safe(tmp_path):
    content, _ = sharded(tmp_path)
    with opened(tmp_path) as checkpoint:
        mapped = {name: checkpoint[name] for name in checkpoint}
    for size in ("5GB", 200, "1KiB"):
        save_tensors(mapped, tmp_path, max_shard_size=size)
        assert all(torch.equal(mapped[name], tensor) for name, tensor in content.items())
        with opened(tmp_path) as checkpoint:
            assert all(torch.equal(checkpoint[name], tensor) for name, tensor in content.items())


def test_a_save_that_fails_changes_nothing(tmp_path, monkeypatch):
    content, _ = sharded(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match=r"layer\.0\.weight is on the meta device"):
        save_tensors({**content, "layer.0.weight": torch.empty(8, 4, device="meta")}, tmp_path)
    calls = []

    def full_disk(*args):
        calls.append(args)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("diffusion_core.offload.saving._write_bytes", full_disk)
    with pytest.raises(OSError, match="No space"):
        save_tensors(content, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_shard_size": "5 parsecs"}, "max_shard_size"),
        ({"max_shard_size": 0}, "max_shard_size"),
        ({"max_shard_size": -1}, "max_shard_size"),
        ({"variant": "../x"}, "variant"),
        ({"variant": ""}, "variant"),
        ({"checksum": True, "safetensors": False}, "checksum"),
    ],
)
def test_bad_arguments_to_save_are_named(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        save_tensors(tensors(), tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


# Case 32: two names for one tensor.
@pytest.mark.parametrize("size", ["5GB", 128])
@pytest.mark.parametrize("safetensors", [True, False])
def test_a_tensor_with_two_names_is_stored_once(tmp_path, size, safetensors):
    content = tensors(3)
    content["copy.weight"] = content["layer.1.weight"]
    files = save_tensors(content, tmp_path, max_shard_size=size, safetensors=safetensors)
    with Checkpoint(find_weights(tmp_path, use_safetensors=safetensors)) as checkpoint:
        if safetensors:
            assert checkpoint.aliases == {"copy.weight": "layer.1.weight"}
            assert set(checkpoint) == set(content) - {"copy.weight"}
            assert checkpoint.nbytes() == 3 * 128
            assert sum(path.stat().st_size for path in files) < 3 * 128 + 600 * len(files)
        else:
            assert torch.equal(checkpoint["copy.weight"], content["layer.1.weight"])


def test_equal_views_are_one_tensor_and_other_views_are_not(tmp_path):
    base = torch.arange(8.0)
    content = {"whole": base, "half": base[:4], "again": base.view(8), "turned": base.view(2, 4).t()}
    save_tensors(content, tmp_path)
    with opened(tmp_path) as checkpoint:
        assert checkpoint.aliases == {"again": "whole"}
        assert torch.equal(checkpoint["half"], base[:4]) and torch.equal(checkpoint["turned"], content["turned"])


# Case 28: right size, wrong bytes.
def test_a_flipped_bit_is_found_by_the_checksum(tmp_path):
    for size in ("5GB", 200):
        files = save_tensors(tensors(), tmp_path, checksum=True, max_shard_size=size)
        opened(tmp_path, verify_checksum=True).close()
        content = bytearray(files[-1].read_bytes())
        content[-3] ^= 16
        files[-1].write_bytes(content)
        opened(tmp_path).close()
        with pytest.raises(CorruptFileError, match=f"{files[-1].name} has the right size but other bytes"):
            opened(tmp_path, verify_checksum=True)
    save_tensors(tensors(), tmp_path)
    with pytest.raises(ValueError, match="holds no hash"):
        opened(tmp_path, verify_checksum=True)


def test_finite_values_are_told_from_others():
    assert is_finite(torch.ones(10)) and is_finite(torch.ones(3, dtype=torch.int8)) and is_finite(torch.empty(0))
    assert is_finite(torch.ones(3).to(torch.float8_e4m3fn)) and is_finite(torch.empty(2, device="meta"))
    for value in (float("nan"), float("inf"), -float("inf")):
        bad = torch.ones(5_000_000)
        bad[-1] = value
        assert not is_finite(bad)


# Case 20, and what a .bin file may not hold.
class Evil:
    def __reduce__(self):
        return os.system, ("echo gotcha",)


@pytest.mark.parametrize(
    ("content", "message"),
    [(Evil(), "cannot be read"), ([1], "holds a list"), ({"a": 3}, "no tensors"), ({3: torch.ones(1)}, "no tensors")],
)
def test_a_bin_file_holds_named_tensors_and_nothing_else(tmp_path, content, message):
    torch.save(content, tmp_path / f"{NAME}.bin")
    with pytest.raises(CorruptFileError, match=message):
        opened(tmp_path)


@pytest.mark.parametrize("content", [b"", b"<html>", b"PK\x03\x04 broken", b"\x80\x02}q\x00", b"\x80\x04\x95"])
def test_a_broken_bin_file_is_named(tmp_path, content):
    (tmp_path / f"{NAME}.bin").write_bytes(content)
    with pytest.raises(CorruptFileError, match=rf"{NAME}\.bin"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("content", "cause"), [(b"<html>" * 9, "web page"), (b"PK\x03\x04" + b"\0" * 50, "cut off"), (b"", "is empty")]
)
def test_a_broken_bin_file_tells_its_size_and_cause(tmp_path, content, cause):
    (tmp_path / f"{NAME}.bin").write_bytes(content)
    with pytest.raises(CorruptFileError, match=rf"\({len(content)} bytes\).*{cause}") as caught:
        opened(tmp_path)
    assert "weights_only" not in str(caught.value)


def test_bin_files_of_old_torch_versions_are_read(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / f"{NAME}.bin", _use_new_zipfile_serialization=False)
    assert opened(tmp_path)["a"].tolist() == [1, 1]


def test_only_bin_files_are_taken_with_a_warning_and_never_against_use_safetensors(tmp_path, caplog):
    for size in ("5GB", 128):
        save_tensors(tensors(), tmp_path, safetensors=False, max_shard_size=size)
        caplog.clear()
        with opened(tmp_path) as checkpoint:
            assert len(checkpoint) == 4
        assert "no safetensors weights" in caplog.text
        with pytest.raises(MissingFileError, match=r"With use_safetensors=None, \.bin files count too"):
            find_weights(tmp_path, use_safetensors=True)
    save_tensors({"only": torch.ones(1)}, tmp_path)
    assert set(opened(tmp_path)) == {"only"}
    assert len(Checkpoint(find_weights(tmp_path, use_safetensors=False))) == 4


def test_memory_formats_are_noted(tmp_path):
    content = {
        "flat": torch.randn(4, 3, 3, 3),
        "image": torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last),
        "video": torch.randn(4, 3, 2, 3, 3).to(memory_format=torch.channels_last_3d),
    }
    path = save_tensors(content, tmp_path)[0]
    with opened(tmp_path) as checkpoint:
        assert checkpoint.channels_last == {"image", "video"}
    assert all(torch.equal(tensor, content[name]) for name, tensor in load_file(path).items())


def test_a_missing_file_and_odd_dtypes_are_named(tmp_path):
    with pytest.raises(MissingFileError, match="nothing"):
        Checkpoint(WeightFiles((tmp_path / "nothing",), None, True))
    with pytest.raises(CheckpointError, match="complex128"):
        save_tensors({"a": torch.ones(1, dtype=torch.complex128)}, tmp_path)
    with pytest.raises(CheckpointError, match="layout"):
        save_tensors({"a": torch.ones(2, 2).to_sparse()}, tmp_path)
    assert parse_dtype("torch.bfloat16") is parse_dtype("bf16") is torch.bfloat16
    assert parse_dtype(None) is None
    for bad, kind in (
        ("float17", ValueError),
        ("int8", ValueError),
        (torch.int8, ValueError),
        (16, TypeError),
        ("nn", ValueError),
    ):
        with pytest.raises(kind, match="dtype"):
            parse_dtype(bad)


def test_threads_may_save_to_and_read_from_one_folder(tmp_path):
    content = tensors()
    save_tensors(content, tmp_path)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(15):
                if number % 2:
                    save_tensors(content, tmp_path)
                else:
                    with opened(tmp_path) as checkpoint:
                        assert all(torch.equal(checkpoint[name], tensor) for name, tensor in content.items())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert names(tmp_path) == {SINGLE}
