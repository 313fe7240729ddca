"""What is read from checkpoint files without torch, and that no file can do more than waste a little time."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kb.checkpoint import Unreadable, read_checkpoint

torch = pytest.importorskip("torch", exc_type=ImportError)


def safetensors(path: Path, header: dict[str, Any], data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def saved(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


def with_pickle(path: Path, data: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
    return path


def test_tensors_of_a_nested_checkpoint_have_their_path_dtype_and_shape(tmp_path: Path) -> None:
    state = {"model": {"layers.0.weight": torch.ones(2, 3).bfloat16()}, "step": 7, "mask": torch.zeros(4).bool()}
    checkpoint = read_checkpoint(saved(tmp_path / "a.pt", state))
    message = [(tensor.name, tensor.dtype, tensor.shape) for tensor in checkpoint.tensors]
    assert message == [("model.layers.0.weight", "bfloat16", (2, 3)), ("mask", "bool", (4,))]


def test_a_view_keeps_the_bytes_of_its_whole_storage(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(saved(tmp_path / "a.pt", {"w": torch.ones(1000)[10:20]}))
    (tensor,) = checkpoint.tensors
    assert (tensor.start, tensor.stop, tensor.used) == (40, 80, 40)
    assert checkpoint.storages == {tensor.storage: 4000}


def test_dtypes_without_a_typed_storage_are_read_too(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(saved(tmp_path / "a.pt", {"w": torch.ones(3).to(torch.float8_e4m3fn)}))
    assert [(tensor.dtype, tensor.used) for tensor in checkpoint.tensors] == [("float8_e4m3fn", 3)]


def test_names_of_classes_in_a_file_are_listed(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(saved(tmp_path / "a.pt", {"args": argparse.Namespace(lr=1), "path": Path("/x")}))
    assert {"argparse.Namespace"} <= set(checkpoint.names)


def test_safetensors_are_read_from_their_header(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "w": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}
    checkpoint = read_checkpoint(safetensors(tmp_path / "a.safetensors", header, b"x" * 8))
    assert [(tensor.name, tensor.dtype, tensor.shape, tensor.used) for tensor in checkpoint.tensors] == [
        ("w", "bfloat16", (2, 2), 8)
    ]


def test_a_file_cut_short_is_torn(tmp_path: Path) -> None:
    header = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    for whole in (
        saved(tmp_path / "a.pt", {"w": torch.ones(1000)}),
        safetensors(tmp_path / "b.safetensors", header, b"x" * 8),
    ):
        whole.write_bytes(whole.read_bytes()[:-4])
        with pytest.raises(Unreadable) as caught:
            read_checkpoint(whole)
        assert caught.value.is_torn


@pytest.mark.parametrize(
    "content, message",
    {
        b"": "empty",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n": "git-lfs pointer",
        b"<!DOCTYPE html><title>404</title>": "web page",
        b"\0" * 600: "zeros",
    }.items(),
)
def test_what_was_stored_in_place_of_a_checkpoint_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(Unreadable, match=message) as caught:
        read_checkpoint(tmp_path / "a.bin")
    assert caught.value.is_torn


class Runs:
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    folder = tmp_path / "ran"
    checkpoint = read_checkpoint(with_pickle(tmp_path / "a.pt", pickle.dumps({"x": Runs(str(folder))}, protocol=2)))
    assert not folder.exists()
    assert checkpoint.names == ("posix.mkdir",)


@pytest.mark.parametrize(
    "pickled",
    {
        "memory": b"\x80\x02" + b"(" + b"]" + b"2" * 100 + b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
        "depth": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
        "impossible shape": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(cx\ny\n)\x81K\x00tR.",
        "nonsense": b"\x80\x02garbage",
    }.values(),
)
def test_a_hostile_pickle_ends_in_an_error_or_no_tensor(tmp_path: Path, pickled: bytes) -> None:
    try:
        assert read_checkpoint(with_pickle(tmp_path / "a.pt", pickled)).tensors == ()
    except Unreadable as error:
        assert not error.is_torn


def test_a_folder_and_a_pipe_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(Unreadable, match=r"is a folder: name one file of it model\.safetensors"):
        read_checkpoint(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Unreadable, match="not a regular file"):
        read_checkpoint(tmp_path / "pipe")
