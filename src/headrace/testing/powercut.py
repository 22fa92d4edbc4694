"""What a disk may hold after a power cut, worked out from the operation log of a machine.

`Disk` replays the log and keeps apart what is certainly on the disk from what may be there: the
**atoms**, in the order in which they happened. An atom is the data of one un-synced write, one
change of a file's length, or one change of a name in a folder. A `Plan` says which atoms reached
the disk, and of torn writes which 512-byte sectors; every plan gives one disk.

The rules, chosen harsher than ext4 and never harsher than a disk can be:

- `fdatasync` brings data and length of its file, not its name; `fsync_dir` brings the names.
- Un-synced atoms persist in any order and any subset, over files and folders alike; a write may
  be torn between any two sectors, with any of them missing.
- A sector is whole: what reached it holds all earlier writes to it.
- A file's length may come before its data (zeros, or with old data mounting: garbage).
- After a sync that failed, its atoms stay doubtful for ever: no later sync brings them.
- Pages of mapped files go to the disk whenever they like, each on its own.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random

from headrace.testing.disk import SimulatedMachine
from headrace.testing.oplog import (
    EFFECTS,
    PAGE,
    SECTOR,
    Image,
    Op,
    is_derived,
    parent,
    sectors,
)

EVERYTHING = "everything"
EVERY = 1 << 20
"""A bound that leaves nothing out."""
SUBSETS = 10
"""So few atoms give every subset of themselves then."""
_NAMES = ("link", "unlink", "rename", "mkdir")


@dataclass(frozen=True, slots=True)
class Atom:
    """One change that may or may not be on the disk."""

    number: int
    kind: str
    """data, size, or a change of names: link, unlink, rename, mkdir."""
    path: str
    inode: int = 0
    offset: int = 0
    data: bytes = b""
    size: int = 0
    other: str = ""
    doubtful: bool = False
    """Its sync failed."""
    settled: frozenset[int] = frozenset()
    """Sectors of a doubtful write that a later, synced write brought along."""

    def __str__(self) -> str:
        """A few words for a report."""
        name = self.path.rpartition("/")[2]
        if self.kind == "data":
            return f"{name}[{self.offset}+{len(self.data)}]"
        if self.kind == "size":
            return f"{name} size {self.size}"
        return f"{self.kind} {name}" + (
            f" -> {self.other.rpartition('/')[2]}" if self.other else ""
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """Which atoms reached the disk."""

    title: str
    kept: frozenset[int]
    torn: dict[int, frozenset[int]] = field(default_factory=dict)
    """Of these writes only these sectors (counted within the file)."""
    short: dict[int, int] = field(default_factory=dict)
    """Of these lengths only so much."""
    garbage: int | None = None
    """Seed of what stands in lengthened files where no data arrived; None: zeros."""


@dataclass(frozen=True, slots=True)
class CrashState:
    """One disk that a power cut may leave."""

    number: int
    title: str
    image: Image
    boot: bytes
    clock_us: int
    generation: int = 1
    """How many crashes it has behind it."""
    short_cut: bool = False

    def machine(self, *, recorded: bool = True) -> SimulatedMachine:
        """A machine that starts with this disk; see there for `recorded`."""
        machine = SimulatedMachine(self.image, boot=self.boot, clock_us=self.clock_us)
        machine.recorded = recorded
        machine.generation = self.generation
        machine.short_cut = self.short_cut
        return machine


class Disk:
    """A disk in the middle of a history: what is on it for certain, and what may be."""

    def __init__(self, machine: SimulatedMachine) -> None:
        """Begin before the first operation of the machine."""
        self._machine = machine
        self._folders = set(machine.start.folders)
        self._names = {path: number for path, (number, _) in machine.start.files.items()}
        self._files = dict(machine.start.files.values())
        self._cache = {number: bytearray(content) for number, content in self._files.items()}
        self._cached_names = dict(self._names)
        self._cached_folders = set(self._folders)
        self._stores: dict[int, list[tuple[int, int, bytes]]] = {}  # inode: (number, offset, page)
        self.atoms: list[Atom] = []
        self.at = 0

    @classmethod
    def replayed(cls, machine: SimulatedMachine, at: int) -> Disk:
        """The disk before operation `at`."""
        disk = cls(machine)
        disk.advance(at)
        return disk

    def advance(self, at: int) -> None:
        """Replay up to, and without, operation `at`."""
        for op in self._machine.ops[self.at : at]:
            if op.kind in EFFECTS:
                self._apply(op)
        self.at = max(at, self.at)

    # --- replay ---

    def _apply(self, op: Op) -> None:
        getattr(self, f"_on_{op.kind}")(op)

    def _add(self, op: Op, kind: str, *, size: int = 0, data: bytes = b"") -> None:
        self.atoms.append(
            Atom(_next_number(self.atoms), kind, op.path, op.inode, op.offset, data, size, op.other)
        )

    def _on_create(self, op: Op) -> None:
        if op.path not in self._cached_names:
            self._add(op, "link")
            self._cached_names[op.path] = op.inode
            self._files.setdefault(op.inode, b"")
        elif self._cache[op.inode]:
            self._add(op, "size", size=0)
        self._cache[op.inode] = bytearray(op.size)
        if op.size:
            self._add(op, "size", size=op.size)

    def _on_size(self, op: Op) -> None:
        cache = self._cache[op.inode]
        if op.size > len(cache):
            cache.extend(bytes(op.size - len(cache)))
            self._add(op, "size", size=op.size)

    def _on_write(self, op: Op) -> None:
        cache = self._cache[op.inode]
        end = op.offset + len(op.data)
        if end > len(cache):
            cache.extend(bytes(end - len(cache)))
            self._add(op, "size", size=end)
        data = _news(op.data, cache, op.offset)
        cache[op.offset : end] = op.data
        if data:
            self._add(op, "data", data=data)

    def _on_store(self, op: Op) -> None:
        self._cache[op.inode][op.offset : op.offset + len(op.data)] = op.data
        self._stores.setdefault(op.inode, []).append((op.index, op.offset, op.data))

    def _on_fdatasync(self, op: Op) -> None:
        mine = [
            atom for atom in self.atoms if atom.inode == op.inode and atom.kind in ("data", "size")
        ]
        if op.failed:
            if op.drops:
                dropped = {atom.number for atom in mine}
                self.atoms = [
                    _changed(atom, doubtful=True) if atom.number in dropped else atom
                    for atom in self.atoms
                ]
            return
        cache = self._cache[op.inode]
        doubtful = [atom for atom in mine if atom.doubtful]
        brought: set[int] = set()
        if doubtful:
            content = bytearray(self._files[op.inode])
            content[len(content) :] = bytes(max(0, len(cache) - len(content)))
            for atom in mine:
                if not atom.doubtful and atom.kind == "data":
                    brought.update(sectors(atom.offset, len(atom.data)))
            for sector in brought:
                here = slice(sector * SECTOR, (sector + 1) * SECTOR)
                content[here] = cache[here]
            self._files[op.inode] = bytes(content)
        else:
            self._files[op.inode] = bytes(cache)
        self._stores.pop(op.inode, None)
        gone = {atom.number for atom in mine if not atom.doubtful}
        self.atoms = [
            _changed(atom, settled=atom.settled | brought) if atom in doubtful else atom
            for atom in self.atoms
            if atom.number not in gone
        ]

    def _on_evict(self, op: Op) -> None:
        self._cache[op.inode] = bytearray(op.data)
        self.atoms = [
            atom for atom in self.atoms if atom.inode != op.inode or atom.kind in (*_NAMES, "size")
        ]

    def certain(self, inode: int) -> bytes:
        """What of a file is on the disk whatever happens."""
        return self._files[inode]

    def _on_mkdir(self, op: Op) -> None:
        self._cached_folders.add(op.path)
        self._add(op, "mkdir")

    def _on_rename(self, op: Op) -> None:
        self._cached_names[op.other] = self._cached_names.pop(op.path)
        self._add(op, "rename")

    def _on_unlink(self, op: Op) -> None:
        del self._cached_names[op.path]
        self._add(op, "unlink")

    def _on_fsync_dir(self, op: Op) -> None:
        if op.failed:
            return
        rest = []
        for atom in self.atoms:
            if atom.kind in _NAMES and parent(atom.other or atom.path) == op.path:
                _rename(atom, self._names, self._folders)
            else:
                rest.append(atom)
        self.atoms = rest

    # --- power cuts ---

    def crash_states(self, rng: Random, bound: int) -> Iterator[CrashState]:
        """At most `bound` disks that a power cut here may leave, the telling ones first."""
        number = 0
        for plan in self.plans(rng, bound):
            stores: tuple[str, ...] = (rng.choice(("none", "all", "some")),)
            if plan.title == EVERYTHING and any(self._stores.values()):
                stores = ("none", "all", "some", "some")
            for choice in stores[: max(1, bound - number)]:
                yield self._state(number, plan, choice, rng)
                number += 1

    def plans(self, rng: Random, bound: int) -> list[Plan]:
        """The plans of `crash_states`: nothing and everything first, then a choice of the rest.

        The rest is about the atoms of files that hold something; of the others (`DERIVED`) each
        plan has all, none or some.
        """
        every = frozenset(atom.number for atom in self.atoms)
        core = [atom for atom in self.atoms if not is_derived(atom.path)]
        first = [Plan("nothing un-synced", frozenset()), Plan(EVERYTHING, every)]
        rest = [*_ordered(core), *_torn(core, rng), *_metadata(core)]
        room = max(0, bound - len(first))
        if len(rest) > room:
            rest = rng.sample(rest, (room * 3 + 3) // 4)
        if bound >= EVERY and len(core) <= SUBSETS:
            numbers = [atom.number for atom in core]
            rest += [
                Plan(f"{size} of {len(core)}", frozenset(some))
                for size in range(len(core) + 1)
                for some in itertools.combinations(numbers, size)
            ]
        if core:
            more = min(room - len(rest), 8 * len(core))
            rest += [_random(core, rng) for _ in range(more)]
        plans, seen = first[: bound or 1], set()
        for plan in rest:
            key = (plan.kept, repr(sorted(plan.torn.items())), repr(plan.short), plan.garbage)
            if key not in seen:
                seen.add(key)
                plans.append(replace(plan, kept=plan.kept | self._derived(rng)))
        if len(core) < len(self.atoms) and len(plans) < bound:
            some = frozenset(atom.number for atom in core) | self._derived(rng, "some")
            plans.append(Plan(f"{EVERYTHING} but derived files", some))
        return plans

    def _derived(self, rng: Random, which: str = "") -> frozenset[int]:
        """The atoms of derived files that are there: all, none or some."""
        share = {"all": 1.0, "none": 0.0, "some": 0.5}[which or rng.choice(("all", "none", "some"))]
        derived = [atom.number for atom in self.atoms if is_derived(atom.path)]
        return frozenset(number for number in derived if rng.random() < share)

    def _state(self, number: int, plan: Plan, stores: str, rng: Random) -> CrashState:
        image = self.image(plan, None if stores == "all" else rng if stores == "some" else False)
        boot = hashlib.blake2b(
            self._machine.boot + b"%d/%d" % (self.at, number), digest_size=16
        ).digest()
        passed = rng.choice((1, 60, 3600, -3600)) * 1_000_000
        machine = self._machine
        now = (boot, max(0, machine.clock_us + passed), machine.generation + 1, machine.short_cut)
        return CrashState(number, f"{plan.title}; maps: {stores}", image, *now)

    def image(self, plan: Plan, stores: Random | bool | None = None) -> Image:
        """The disk of a plan; `stores`: None for all pages of maps, False for none of them."""
        names, folders = dict(self._names), set(self._folders)
        for atom in self.atoms:
            if atom.kind in _NAMES and atom.number in plan.kept:
                _rename(atom, names, folders)
        reachable = {folder for folder in folders if _has_parents(folder, folders)}
        files = {}
        for path, inode in names.items():
            if parent(path) in reachable:
                files[path] = (inode, self._content(inode, plan, stores))
        return Image(frozenset(reachable), files)

    def _content(self, inode: int, plan: Plan, stores: Random | bool | None) -> bytes:
        atoms = [
            atom for atom in self.atoms if atom.inode == inode and atom.kind in ("data", "size")
        ]
        pages = self._stores.get(inode, []) if stores is not False else []
        if not atoms and not pages:
            return self._files[inode]
        content = bytearray(self._files[inode])
        reached = _reached(atoms, plan)
        for atom in atoms:
            if atom.kind == "size":
                if atom.number in plan.kept:
                    _set_length(content, plan.short.get(atom.number, atom.size), plan.garbage)
            elif reached[atom.number] is not None:
                _write_sectors(content, atom, reached[atom.number] or frozenset())
        for page in _chosen_pages(pages, stores):
            content[page[1] : page[1] + PAGE] = page[2][: max(0, len(content) - page[1])]
        return bytes(content)

    # --- the death of all processes ---

    def killed_states(self, rng: Random, bound: int) -> Iterator[CrashState]:
        """The page cache as it is, and with the coming write done in part; the same boot."""
        machine = self._machine
        now = (machine.boot, machine.clock_us, machine.generation + 1, machine.short_cut)
        yield CrashState(0, "all processes killed", self.cached(), *now)
        coming = machine.ops[self.at] if self.at < len(machine.ops) else None
        if coming is None or coming.kind != "write" or coming.inode not in self._cache:
            return
        length = len(coming.data)
        cuts = set(coming.cuts) | set(range(PAGE - coming.offset % PAGE, length, PAGE))
        cuts |= {rng.randrange(1, length) for _ in range(2) if length > 1}
        chosen = sorted(cut for cut in cuts if 0 < cut < length)
        if len(chosen) > bound - 1:
            chosen = sorted(rng.sample(chosen, max(0, bound - 1)))
        for number, cut in enumerate(chosen, 1):
            title = f"killed after {cut} of {length} bytes of a write"
            image = self.cached(coming, cut)
            yield CrashState(number, title, image, *now)

    def cached(self, coming: Op | None = None, cut: int = 0) -> Image:
        """The page cache, perhaps with the first bytes of one more write."""
        files = {}
        for path, number in self._cached_names.items():
            content = self._cache[number]
            if coming is not None and number == coming.inode:
                content = bytearray(content)
                content[coming.offset : coming.offset + cut] = coming.data[:cut]
            files[path] = (number, bytes(content))
        return Image(frozenset(self._cached_folders), files)


def _ordered(atoms: list[Atom]) -> Iterator[Plan]:
    every = [atom.number for atom in atoms]
    for end in range(1, len(every)):
        yield Plan(f"the first {end} of {len(every)}", frozenset(every[:end]))
    for atom in atoms:
        one = frozenset((atom.number,))
        yield Plan(f"only {atom}", one)
        yield Plan(f"all but {atom}", frozenset(every) - one)


def _torn(atoms: list[Atom], rng: Random) -> Iterator[Plan]:
    every = frozenset(atom.number for atom in atoms)
    names = frozenset(atom.number for atom in atoms if atom.kind != "data")
    for atom in atoms:
        if atom.kind != "data":
            continue
        before = names | {other for other in every if other <= atom.number}
        for title, kept in _tears(atom, rng):
            torn = {atom.number: kept}
            yield Plan(f"{atom} torn, {title}", before, torn)
            yield Plan(f"{atom} torn, {title}, later ones whole", every, torn)


def _metadata(atoms: list[Atom]) -> Iterator[Plan]:
    names = frozenset(atom.number for atom in atoms if atom.kind in _NAMES)
    lengths = frozenset(atom.number for atom in atoms if atom.kind == "size")
    every = frozenset(atom.number for atom in atoms)
    yield Plan("names only", names)
    yield Plan("names and lengths, no data", names | lengths)
    yield Plan("data and lengths, no names", every - names)
    yield Plan("names and data, no lengths", every - lengths)
    for seed in (1, 2):
        yield Plan("names and lengths, garbage for data", names | lengths, garbage=seed)
    for atom in atoms:
        if atom.kind == "size" and atom.size > PAGE:
            half = atom.size // 2 // PAGE * PAGE
            yield Plan(f"{atom} only half", every, short={atom.number: half})
            yield Plan(f"{atom} but a byte", every, short={atom.number: atom.size - 1})
    for atom in atoms:
        if atom.kind in _NAMES:
            later = frozenset(number for number in names if number > atom.number)
            yield Plan(f"{atom} lost", every - {atom.number})
            yield Plan(f"{atom} and later names lost", every - later - {atom.number})


def _random(atoms: list[Atom], rng: Random) -> Plan:
    share = rng.choice((0.2, 0.5, 0.8, 0.95))
    kept = frozenset(atom.number for atom in atoms if rng.random() < share)
    torn = {}
    for atom in atoms:
        if atom.kind == "data" and rng.random() < 0.3:
            touched = sectors(atom.offset, len(atom.data))
            torn[atom.number] = frozenset(s for s in touched if rng.random() < share)
    garbage = rng.randrange(1, 1000) if rng.random() < 0.1 else None
    return Plan("a random choice", kept, torn, garbage=garbage)


def _news(data: bytes, cache: bytearray, offset: int) -> bytes:
    """A write without the sectors at its end that change nothing: zeros written over zeros."""
    end = offset + len(data)
    while end > offset:
        start = max(offset, (end - 1) // SECTOR * SECTOR)
        if data[start - offset : end - offset] != cache[start:end]:
            break
        end = start
    return data[: end - offset]


def _next_number(atoms: list[Atom]) -> int:
    return atoms[-1].number + 1 if atoms else 0


def _changed(atom: Atom, *, doubtful: bool = True, settled: frozenset[int] = frozenset()) -> Atom:
    return Atom(
        atom.number, atom.kind, atom.path, atom.inode, atom.offset, atom.data, atom.size,
        atom.other, doubtful, settled,
    )  # fmt: skip


def _rename(atom: Atom, names: dict[str, int], folders: set[str]) -> None:
    if atom.kind == "mkdir":
        folders.add(atom.path)
    elif atom.kind == "link":
        names[atom.path] = atom.inode
    elif atom.kind == "unlink":
        names.pop(atom.path, None)
    else:
        names.pop(atom.path, None)
        names[atom.other] = atom.inode


def _has_parents(folder: str, folders: set[str]) -> bool:
    while folder != "/":
        if folder not in folders:
            return False
        folder = parent(folder)
    return True


def _tears(atom: Atom, rng: Random) -> Iterator[tuple[str, frozenset[int]]]:
    touched = list(sectors(atom.offset, len(atom.data)))
    if len(touched) < 2:
        return
    cuts = list(range(1, len(touched)))
    if len(cuts) > 4:
        cuts = sorted({1, len(touched) - 1, *rng.sample(cuts, 2)})
    for cut in cuts:
        yield f"{cut} sectors of {len(touched)}", frozenset(touched[:cut])
    pages = [s for s in touched if s * SECTOR % PAGE == 0 and s > touched[0]]
    for boundary in pages[:1] + pages[-1:]:
        yield f"pages before {boundary}", frozenset(s for s in touched if s < boundary)
        yield f"pages from {boundary}", frozenset(s for s in touched if s >= boundary)
    yield "first sector missing", frozenset(touched[1:])
    if len(touched) > 2:
        missing = rng.choice(touched[1:-1])
        yield f"sector {missing} missing", frozenset(touched) - {missing}
        yield "a random half", frozenset(s for s in touched if rng.random() < 0.5)


def _reached(atoms: list[Atom], plan: Plan) -> dict[int, frozenset[int] | None]:
    """Of each write the sectors that are there; None when nothing of it is.

    A sector that a later write brought holds the earlier writes to it as well.
    """
    reached: dict[int, frozenset[int] | None] = {}
    brought: set[int] = set()
    for atom in reversed(atoms):
        if atom.kind != "data":
            continue
        touched = sectors(atom.offset, len(atom.data))
        mine: set[int] = set()
        if atom.number in plan.kept:
            mine = set(plan.torn.get(atom.number, touched))
        mine |= brought.intersection(touched)
        brought |= mine
        reached[atom.number] = frozenset(mine - atom.settled) or None
    return reached


def _write_sectors(content: bytearray, atom: Atom, kept: frozenset[int]) -> None:
    touched = sectors(atom.offset, len(atom.data))
    end = min(atom.offset + len(atom.data), len(content))
    if len(kept) == len(touched):
        if end > atom.offset:
            content[atom.offset : end] = atom.data[: end - atom.offset]
        return
    for sector in kept:
        low = max(sector * SECTOR, atom.offset)
        high = min((sector + 1) * SECTOR, end)
        if low < high:
            content[low:high] = atom.data[low - atom.offset : high - atom.offset]


def _set_length(content: bytearray, length: int, garbage: int | None) -> None:
    if length < len(content):
        del content[length:]
        return
    more = length - len(content)
    if garbage is None:
        content.extend(bytes(more))
    elif garbage % 2 and content:
        content.extend(
            (bytes(content) * (more // len(content) + 1))[:more]
        )  # old blocks of its own
    else:
        content.extend(Random(garbage).randbytes(more))


def _chosen_pages(
    pages: list[tuple[int, int, bytes]], stores: Random | bool | None
) -> list[tuple[int, int, bytes]]:
    if not isinstance(stores, Random) or not pages:
        return pages
    first = pages[0][0]
    until = {
        offset: stores.choice([first - 1, *(page[0] for page in pages)]) for _, offset, _ in pages
    }
    return [page for page in pages if page[0] <= until[page[1]]]
