"""Where sealed files are: below the log's folder, or in an archive that `pyarrow.fs` reaches."""

from __future__ import annotations

import errno
from typing import Any

import pyarrow as pa
from pyarrow import fs

from headrace import errors
from headrace.log.embedded.sealed import SealedReader, missing
from headrace.log.embedded.system import System, os_errors
from headrace.model.sealed import SealedFile

FOLDER = "sealed"
COPY_BYTES = 4 << 20


def local_path(folder: str, name: str) -> str:
    """Where a sealed file is before it is archived."""
    return f"{folder}/{FOLDER}/{name}"


def open_sealed(system: System, folder: str, described: SealedFile) -> SealedReader:
    """Open a sealed file of the log in `folder`, wherever it is; gone or altered means damage."""
    try:
        if described.archive:
            path = f"{described.archive}/{described.name}"
            with os_errors("opening an archived file", path):
                return SealedReader(ArchivedFile(path), described)
        path = local_path(folder, described.name)
        with os_errors("opening a sealed file", path):
            return SealedReader(system.open(path), described)
    except errors.IoFailed as error:
        if error.details["errno"] != errno.ENOENT:
            raise
        raise missing(described, path) from None


def store(system: System, folder: str, described: SealedFile, archive: str) -> None:
    """Copy a sealed file to an archive; it is whole there when this returns."""
    source = system.open(local_path(folder, described.name))
    where, path = _filesystem(f"{archive}/{described.name}")
    with os_errors("writing to the archive", f"{archive}/{described.name}"):
        where.create_dir(path.rpartition("/")[0], recursive=True)
        with where.open_output_stream(f"{path}.part") as out:
            for at in range(0, described.bytes, COPY_BYTES):
                out.write(source.read(min(COPY_BYTES, described.bytes - at), at))
        where.move(f"{path}.part", path)
    source.close()
    if where.type_name == "local":  # an object store has it when it is closed; a disk may not
        file = system.open(path)
        file.fdatasync()
        file.close()
        system.fsync_dir(path.rpartition("/")[0])
    copy = open_sealed(system, folder, _at(described, archive))
    try:
        for group in copy.groups():
            copy.verify(group)
    finally:
        copy.close()


def reachable(path: str, size: int) -> bool:
    """Whether a file of an archive is there, as far as its size tells."""
    try:
        file = ArchivedFile(path)
        found = file.size()
        file.close()
    except (OSError, errors.HeadraceError):
        return False
    return found == size


def _at(described: SealedFile, archive: str) -> SealedFile:
    return SealedFile.from_json({**described.to_json(), "archive": archive})


def _filesystem(address: str) -> tuple[Any, str]:
    if "://" not in address:
        return fs.LocalFileSystem(), address
    try:
        where, path = fs.FileSystem.from_uri(address)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise errors.BadSetting(
            f"the archive {address} cannot be reached: {error}", place="archive"
        ) from error
    return where, path


class ArchivedFile:
    """A file of an archive, to be read."""

    def __init__(self, path: str) -> None:
        """`path` may be an address."""
        self.path = path
        where, inside = _filesystem(path)
        try:
            self._file = where.open_input_file(inside)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "no such file", path) from None

    def pread(self, length: int, offset: int) -> bytes:
        """See `File`."""
        with os_errors("reading an archived file", self.path):
            found: bytes = self._file.read_at(length, offset)
        return found

    def read(self, length: int, offset: int) -> pa.Buffer:
        """See `File`."""
        return pa.py_buffer(self.pread(length, offset))

    def size(self) -> int:
        """See `File`."""
        return int(self._file.size())

    def close(self) -> None:
        """See `File`."""
        self._file.close()
