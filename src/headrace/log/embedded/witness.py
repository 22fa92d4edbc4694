"""The witness: a second place that says how far the log was synced.

Closed journal files are named, with their ends, by the next checkpoint; the newest is named by
nobody. If it gets lost, or an old copy is put in its place, the log would just end earlier. So with
every mark a small file is written: magic, log id, synced end, checksum (40 bytes). Recovery takes
it as one more synced end. One that is missing, torn or old says less, and does no harm.
"""

from __future__ import annotations

from headrace.log.embedded.format import checksum
from headrace.log.embedded.system import System, os_errors

NAME = "witness"
MAGIC = b"HRend\0\0\1"


def write_witness(system: System, folder: str, log_id: bytes, end: int) -> None:
    """Everything below the address `end` is on the disk."""
    body = MAGIC + log_id + end.to_bytes(8, "little")
    with os_errors("writing the witness", f"{folder}/{NAME}"):
        file = system.open(f"{folder}/{NAME}", create=True)
        file.pwritev([body + checksum(body).to_bytes(8, "little")], 0)
        file.fdatasync()
        file.close()


def read_witness(system: System, folder: str, log_id: bytes) -> int:
    """The synced end that the witness names; 0 if there is none, or it is not whole."""
    try:
        file = system.open(f"{folder}/{NAME}")
    except FileNotFoundError:
        return 0
    data = file.pread(40, 0)
    file.close()
    body = data[:32]
    if body[:24] != MAGIC + log_id or data[32:] != checksum(body).to_bytes(8, "little"):
        return 0
    return int.from_bytes(body[24:], "little")
