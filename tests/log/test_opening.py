"""Opening a log where something is odd: the address, the folder, the rights of the user.

Caught: a folder made where none was meant, what the system says passed on without a code.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import headrace as hr
from headrace import errors
from headrace.log.embedded import system


@pytest.mark.parametrize("address", ["http://host/x", "postgresql://me:secret@host/db"])
def test_an_address_that_is_no_folder_makes_none(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.BadSetting) as caught:
        hr.connect(address)
    assert "secret" not in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_the_home_of_the_user_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with hr.connect("~/data") as log:
        assert log.path == str(tmp_path / "data")


def test_a_path_may_be_bytes(tmp_path: Path) -> None:
    with hr.connect(os.fsencode(tmp_path / "data")) as log:  # type: ignore[arg-type]
        assert log.path == str(tmp_path / "data")


def test_a_folder_that_cannot_be_looked_into_is_an_error_of_the_catalogue(tmp_path: Path) -> None:
    with pytest.raises(errors.IoFailed, match="File name too long"):
        hr.connect(tmp_path / ("x" * 300))


def test_a_mount_whose_name_is_no_text_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_bytes(b"1 1 0:1 / /\xff rw - nfs x rw\n2 1 0:1 / / rw - ext4 x rw\n")
    monkeypatch.setattr(system, "MOUNTS", str(mounts))
    assert system.filesystem_of("/somewhere") == "ext4"
