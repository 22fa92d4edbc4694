"""Groups without a log: who gets which partition, and the arithmetic of lag.

Caught: a partition that nobody or two have, moves that are not needed, loads that a single move
would even out, a group whose changes lose or invent owners, figures of lag that differ from those
of an oracle which counts events one by one. Not caught: what a log makes of it (`tests/log`).
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from headrace.model.groups import NOBODY, GroupState, Member, assign, matches
from headrace.model.lag import BY_SIZE, BY_TIME, KEPT, NEVER_COMMITTED, NOTHING_TO_READ, Lag, summed
from headrace.model.policy import Policy

TOPICS = ("a", "b", "c")
Drawn = tuple[dict[int, frozenset[str]], dict[str, tuple[int, ...]]]


@st.composite
def groups(draw: st.DrawFn) -> Drawn:
    """What each member wants, and who has what: members that are gone, too."""
    numbers = draw(st.sets(st.integers(1, 9), max_size=6))
    wanted = {n: frozenset(draw(st.sets(st.sampled_from(TOPICS)))) for n in sorted(numbers)}
    owners = {
        topic: tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))) for topic in TOPICS
    }
    return wanted, owners


def loads(wanted: dict[int, frozenset[str]], target: dict[str, tuple[int, ...]]) -> Counter[int]:
    found = Counter(dict.fromkeys(wanted, 0))
    found.update(member for members in target.values() for member in members if member)
    return found


@given(groups())
def test_every_partition_has_one_member_who_wants_it(group: Drawn) -> None:
    """R-A7: in a group each event goes to one member."""
    wanted, owners = group
    target = assign(wanted, owners)
    assert {topic: len(members) for topic, members in target.items()} == {
        topic: len(members) for topic, members in owners.items()
    }
    for topic, members in target.items():
        able = {member for member, topics in wanted.items() if topic in topics}
        assert set(members) <= (able or {NOBODY})


@given(groups())
def test_no_single_move_makes_it_more_even(group: Drawn) -> None:
    wanted, owners = group
    target = assign(wanted, owners)
    load = loads(wanted, target)
    for topic, members in target.items():
        for giver in set(members) - {NOBODY}:
            for taker, topics in wanted.items():
                assert topic not in topics or load[giver] - load[taker] < 2


@given(groups())
def test_nothing_moves_that_need_not(group: Drawn) -> None:
    """What is even stays; a second look changes nothing; no member both gives and takes."""
    wanted, owners = group
    target = assign(wanted, owners)
    assert assign(wanted, target) == target
    gave, took = set(), set()
    for topic, members in target.items():
        for old, new in zip(owners[topic], members, strict=True):
            if old in wanted and topic in wanted[old] and old != new:
                gave.add(old)
                took.add(new)
    if len({wanted[member] for member in wanted}) == 1:  # else a move may be one of a chain
        assert not gave & took


def test_a_member_that_joins_takes_its_share_and_no_more() -> None:
    wanted = dict.fromkeys((1, 2), frozenset("a"))
    before = assign(wanted, {"a": (NOBODY,) * 12})
    after = assign({**wanted, 3: frozenset("a")}, before)
    moved = [(old, new) for old, new in zip(before["a"], after["a"], strict=True) if old != new]
    assert len(moved) == 4
    assert {new for _, new in moved} == {3}


def test_thousand_partitions_are_spread_evenly() -> None:
    wanted = {number: frozenset("a") for number in range(1, 8)}
    load = loads(wanted, assign(wanted, {"a": (NOBODY,) * 1000}))
    assert max(load.values()) - min(load.values()) == 1


def test_a_pattern_is_a_name_or_matches_it() -> None:
    assert matches("shop.orders", ["shop.*"])
    assert matches("shop.orders", ["other", "shop.orders"])
    assert not matches("shopkeeper", ["shop.*"])
    assert not matches("Shop.orders", ["shop.*"])


# --- the group, one generation after the other ----------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["join", "leave", "hand over", "topics"]),
        st.integers(0, 5),
        st.integers(1, 5),
    ),
    max_size=25,
)


@given(STEPS)
def test_a_partition_moves_only_from_who_is_gone_or_gives_it(
    steps: list[tuple[str, int, int]],
) -> None:
    state = GroupState()
    for step, which, count in steps:
        members = sorted(state.members)
        before = state
        gone: list[int] = []
        giver = NOBODY
        if step == "join":
            state = state.next(member=Member("lock", 1, ("*",), 30.0))
            assert state.generation in state.members
        elif step == "topics":
            state = state.next(topics={f"t{n}": (n + 1, count) for n in range(which)})
        elif members and step == "leave":
            gone = [members[which % len(members)]]
            state = state.next(gone=gone)
        elif members:
            giver = members[which % len(members)]
            state = state.handed_over(giver, before.to_hand_over(giver))
            assert not state.to_hand_over(giver)
        assert state.generation == before.generation + (state is not before)
        for name, division in state.topics.items():
            assert all(division.owner) == bool(state.members)
            assert set(division.owner) | set(division.target) <= {*state.members, NOBODY}
            old = before.topics.get(name)
            if old is not None and len(old.owner) == len(division.owner):
                for was, now in zip(old.owner, division.owner, strict=True):
                    assert was == now or was in (NOBODY, giver, *gone)
        assert GroupState.from_json(state.to_json()) == state


# --- lag ------------------------------------------------------------------------------------------

SECOND = 1_000_000


@given(
    times=st.lists(st.integers(0, 10**9), max_size=12).map(sorted),
    start=st.integers(0, 12),
    committed=st.none() | st.integers(0, 12),
    now=st.integers(0, 2 * 10**9),
    keep=st.none() | st.integers(0, 2000),
    keep_bytes=st.none() | st.just(10),
)
def test_lag_is_what_counting_gives(
    times: list[int],
    start: int,
    committed: int | None,
    now: int,
    keep: int | None,
    keep_bytes: int | None,
) -> None:
    """R-A12: events, seconds and the time to fall, against events counted one by one."""
    end, start = len(times), min(start, len(times))
    committed = None if committed is None else min(committed, end)
    policy = Policy(retention_seconds=keep, retention_bytes=keep_bytes)
    unread = [] if committed is None else list(range(committed, end))
    held = [offset for offset in unread if offset >= start]
    oldest = times[held[0]] if held else None
    lag = Lag("t", 0, committed, start, end, oldest, now, policy)
    if committed is None:
        assert (lag.events, lag.seconds, lag.fall) == (None, None, NEVER_COMMITTED)
        assert lag.falls_off_seconds is None
        return
    assert (lag.events, lag.gone) == (len(unread), len([o for o in unread if o < start]))
    if not unread:
        assert (lag.seconds, lag.fall, lag.falls_off_seconds) == (0.0, NOTHING_TO_READ, None)
        return
    ages = [max(0, now - times[offset]) / SECOND for offset in held]
    assert lag.seconds == (max(ages) if ages else None)
    if keep is None:
        assert lag.fall == (KEPT if keep_bytes is None else BY_SIZE)
        assert lag.falls_off_seconds is None
    else:
        assert lag.fall == BY_TIME
        left = [max(0.0, keep - age) for age in ages]
        assert lag.falls_off_seconds == (min(left) if left else None)


def test_unknown_is_not_zero_in_a_sum() -> None:
    policy = Policy(retention_seconds=100)
    new = Lag("t", 0, None, 0, 7, None, 0, policy)
    read = Lag("t", 1, 5, 0, 5, None, 0, policy)
    late = Lag("t", 2, 1, 0, 5, 10 * SECOND, 70 * SECOND, policy)
    assert summed([new]).seconds is None
    assert summed([read]).seconds == 0.0
    both = summed([new, read, late])
    assert (both.events, both.unknown, both.seconds, both.falls_off_seconds) == (4, 1, 60.0, 40.0)
    assert both.warns(40)
    assert not both.warns(39)
    assert summed([Lag("t", 0, 0, 1, 1, None, 0, Policy())]).warns(0)
