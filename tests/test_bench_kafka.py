"""The broker that benchmarks and tests stand against: real, on the loopback, gone afterwards.

This can catch: a list of jars that does not make a broker, a start that is told too early, data
lost by a kill and a restart on the same folder, a port that others can reach, processes and folders
left behind, also by a test run that was killed, other rows for Kafka than for us. It cannot say
whether Kafka is configured well: that is argued in docs/kafka.md.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.json
import pytest

from benchmarks.kafka import ROW_BYTES, json_rows, payloads
from benchmarks.log import bids
from headrace.testing import kafka
from headrace.testing.kafka import Broker, Unavailable

KILLED = """
import json, os, signal, sys
from headrace.testing.kafka import Broker
with Broker() as broker:
    print(json.dumps([broker.pid, str(broker.folder)]), flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    try:
        made = Broker()
    except Unavailable as error:
        pytest.skip(str(error))
    with made:
        yield made


def test_what_was_acknowledged_is_there_after_a_kill_and_a_restart(broker: Broker) -> None:
    from confluent_kafka import Consumer, Producer, TopicPartition

    broker.create_topic("kept")
    refused: list[object] = []
    producer = Producer(broker.client(acks="all"))
    for number in range(1000):
        producer.produce("kept", b"%d" % number, on_delivery=lambda bad, _: refused.append(bad))
    assert producer.flush(30) == 0
    assert set(refused) == {None}
    killed, address = broker.pid, broker.address
    broker.kill()
    assert not alive(killed)
    broker.start()
    assert broker.address == address
    consumer = Consumer(broker.client(group_id="none", enable_auto_commit=False))
    consumer.assign([TopicPartition("kept", 0, 0)])
    found: list[bytes | None] = []
    while len(found) < 1000 and (records := consumer.consume(1000, 30)):
        found += [record.value() for record in records]
    consumer.close()
    assert found == [b"%d" % number for number in range(1000)]


def test_nobody_beyond_the_loopback_can_reach_it(broker: Broker) -> None:
    assert broker.ports
    loopback = "0100007F"  # 127.0.0.1, as /proc writes it
    expected = {f"{loopback}:{port:04X}" for port in broker.ports}
    assert listening(broker.pid) == expected


def test_a_killed_test_run_leaves_neither_broker_nor_folder(broker: Broker) -> None:
    """`broker` says whether there can be one at all."""
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        pid, folder = json.loads(process.stdout.readline())
        assert alive(pid)
        os.kill(process.pid, signal.SIGKILL)
    until(lambda: not alive(pid) and not Path(folder).exists())


def test_jars_that_are_not_the_listed_ones_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fetch(work: Path, into: Path) -> None:
        into.mkdir()
        for name in kafka._listed():
            (into / name).write_bytes(b"something else")

    monkeypatch.setattr(kafka, "_fetch", fetch)
    with pytest.raises(Unavailable, match=r"not those of kafka\.sha256: lz4-java-"):
        kafka.jars()
    assert list(tmp_path.glob("headrace/*")) == []


def test_without_a_network_it_says_what_could_not_be_had(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Java goes through a proxy that is not there, as it would on a machine without a network."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    nowhere = "-Dhttps.proxyHost=127.0.0.1 -Dhttps.proxyPort=9 -DproxySet=true"
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", nowhere)
    assert kafka.main() == 1
    said = capsys.readouterr().err
    assert "Kafka's jars could not be fetched" in said or "no Kafka without Java" in said


def test_kafka_is_given_the_rows_that_we_are_given() -> None:
    rows = bids(1000)
    lines = io.BytesIO(b"\n".join(json_rows(rows)))
    options = pyarrow.json.ParseOptions(explicit_schema=rows.schema)
    read = pyarrow.json.read_json(lines, parse_options=options)
    assert read.combine_chunks().to_batches() == [rows]
    assert {len(value) for value in payloads(1000)} == {ROW_BYTES}
    assert rows.nbytes == 1000 * ROW_BYTES


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def listening(pid: int) -> set[str]:
    """The addresses at which a process listens, as /proc writes them."""
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            sockets.add(os.readlink(link))
    lines = [
        line.split()
        for table in ("tcp", "tcp6", "udp", "udp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    bound = {"0A", "07"}  # listening, and datagrams
    return {one[1] for one in lines if one[3] in bound and f"socket:[{one[9]}]" in sockets}


def until(true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 20
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.02)
