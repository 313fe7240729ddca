from __future__ import annotations

from pathlib import Path

import pytest

from kb.packages import numbers, release, version


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in front of the others where Python looks for packages."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def install(site: Path, name: str, metadata: str) -> None:
    folder = site / f"{name.replace('-', '_')}-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(metadata)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2.13.0+cu128", (2, 13, 0)),
        ("2.27.3", (2, 27, 3)),
        ("2.6.0a0+ecf3bae40a.nv25.1", (2, 6, 0)),
        ("4.57.0.dev0", (4, 57, 0)),
        ("2.8.3.post1", (2, 8, 3)),
        ("1.16", (1, 16)),
        ("unknown", ()),
        ("0", ()),
        ("", ()),
        ("٢.١٣.٠", ()),
    ],
)
def test_of_a_version_the_numbers_of_its_release_count(text: str, expected: tuple[int, ...]) -> None:
    assert numbers(text) == expected


def test_a_package_has_the_version_of_its_metadata(site: Path) -> None:
    install(site, "kb-sample", "Metadata-Version: 2.1\nName: kb-sample\nVersion: 1.2.3+local\n")
    assert (version("kb-sample"), release("kb-sample")) == ("1.2.3+local", (1, 2, 3))


@pytest.mark.parametrize("metadata", ["", "Name: kb-sample\n", "\0"])
def test_damaged_metadata_say_nothing(site: Path, metadata: str) -> None:
    install(site, "kb-sample", metadata)
    assert (version("kb-sample"), release("kb-sample")) == ("", ())


def test_a_package_that_is_not_there_says_nothing() -> None:
    assert (version("kb-no-such-package"), release("kb-no-such-package")) == ("", ())
