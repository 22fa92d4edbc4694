"""The corruptor: what disks, cables and people do to the files of a log.

`damages` lists ways to spoil the files of a folder, seeded and bounded, over every one of them:
bits flipped, blocks of 512 B and 4 KB zeroed, swapped, put in the wrong place or back from another
version, files cut short, lengthened, emptied, deleted, or replaced by another version of
themselves. A damage is a function of the content: a simulated disk is spoiled in memory.

What must follow is for the caller to say; for the log it is: an error or a finding of `check` that
names the file, or the same rows as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random

BLOCKS = (512, 4096)


@dataclass(frozen=True, slots=True)
class Damage:
    """One way to spoil one file."""

    file: str
    """Relative to the folder."""
    title: str
    change: Callable[[bytes], bytes | None]
    """Old content to new; None: the file is gone."""

    def __str__(self) -> str:
        """A line for a report."""
        return f"{self.file}: {self.title}"


def damages(
    contents: Mapping[str, bytes], rng: Random, *, each: int = 3,
    others: Mapping[str, Mapping[str, bytes]] | None = None,
) -> Iterator[Damage]:  # fmt: skip
    """Ways to spoil each file, `each` of a kind; all of them change something.

    `others` are other versions of the same files, by a name for them: an older one, or that of a
    copy that went another way.
    """
    for name, content in contents.items():
        versions = {title: files[name] for title, files in (others or {}).items() if name in files}
        for damage in _ways(name, content, versions, rng, each):
            if damage.change(content) != content:
                yield damage


def _ways(
    name: str, content: bytes, versions: Mapping[str, bytes], rng: Random, each: int
) -> Iterator[Damage]:
    yield Damage(name, "deleted", lambda _: None)
    yield from _lengths(name, content, rng, each)
    end = max(1, len(content.rstrip(b"\0")))
    if content:
        yield from _bits(name, content, end, rng, each)
        yield from _blocks(name, content, end, rng, each)
    for title, version in versions.items():
        if version != content:
            yield from _stale(name, title, content, version, rng, each)


def _lengths(name: str, content: bytes, rng: Random, each: int) -> Iterator[Damage]:
    cuts = {0, len(content) // 2, len(content) - 1}
    cuts |= {rng.randrange(len(content) or 1) for _ in range(each)}
    for cut in sorted(cut for cut in cuts if 0 <= cut < len(content)):
        yield Damage(name, f"cut at {cut}", lambda old, cut=cut: old[:cut])  # type: ignore[misc]
    yield Damage(name, "1 KB of garbage behind", lambda old: old + Random(1).randbytes(1024))


def _bits(name: str, content: bytes, end: int, rng: Random, each: int) -> Iterator[Damage]:
    bits = {rng.randrange(end * 8) for _ in range(3 * each)}
    bits |= {rng.randrange(len(content) * 8), rng.randrange(min(end, 128) * 8)}
    for bit in sorted(bits):

        def flip(old: bytes, bit: int = bit) -> bytes:
            new = bytearray(old)
            new[bit // 8] ^= 1 << bit % 8
            return bytes(new)

        yield Damage(name, f"bit {bit % 8} of byte {bit // 8} flipped", flip)


def _blocks(name: str, content: bytes, end: int, rng: Random, each: int) -> Iterator[Damage]:
    for size in BLOCKS:
        count = -(-end // size)
        for _ in range(each):
            one, two = rng.randrange(count), rng.randrange(count)
            filler = rng.randbytes(size)
            yield Damage(name, f"{size} B at {one * size} zeroed", _put(one * size, bytes(size)))
            yield Damage(name, f"{size} B at {one * size} garbage", _put(one * size, filler))
            if one == two:
                continue

            def swap(
                old: bytes, one: int = one * size, two: int = two * size, n: int = size
            ) -> bytes:
                first, second = old[one : one + n], old[two : two + n]
                return _put(two, first)(_put(one, second)(old))

            moved = content[one * size : (one + 1) * size]
            yield Damage(name, f"{size} B at {one * size} and {two * size} swapped", swap)
            yield Damage(
                name, f"{size} B of {one * size} also at {two * size}", _put(two * size, moved)
            )


def _stale(
    name: str, title: str, content: bytes, old: bytes, rng: Random, each: int
) -> Iterator[Damage]:
    yield Damage(name, f"the {title} version", lambda _: old)
    for size in BLOCKS:
        places = [
            at for at in range(0, min(len(old), len(content)), size)
            if old[at : at + size] != content[at : at + size]
        ]  # fmt: skip
        for at in rng.sample(places, min(each, len(places))):
            block = old[at : at + size]
            yield Damage(name, f"{size} B at {at} of the {title} version", _put(at, block))


def _put(at: int, block: bytes) -> Callable[[bytes], bytes]:
    def change(old: bytes) -> bytes:
        kept = block[: max(0, len(old) - at)]
        return old[:at] + kept + old[at + len(kept) :]

    return change
