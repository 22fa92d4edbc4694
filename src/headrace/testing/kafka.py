"""A Kafka broker of one's own, for tests and benchmarks: real, on the loopback, gone afterwards.

*Where it comes from.* `kafka.sha256` beside this file names every jar of the broker, with its
digest. Ivy, which the PySpark wheel carries, fetches them by these names (about 45 MB, once); what
it brings must have these digests, and then lies in the user's cache folder. Only Java is needed,
found as for Spark. Where there is no Java or no network, `jars` raises `Unavailable`, which says
what could not be had; a test is skipped with these words.

*What runs.* One process that is broker and controller, two free ports of the loopback, its data in
a temporary folder. It counts as started when a record has been produced and acknowledged, not when
a port is open. `stock` gives it the flags of its own start script (1 GB of heap, G1); without, it
has a small heap and starts in half the time.

*Nothing may be left behind*: see `watched`.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import NoJava
from headrace.pipelines.spark import cache_folder, find_java
from headrace.testing.watched import Watched, free_ports

JARS = Path(__file__).with_name("kafka.sha256")
SECONDS_TO_FETCH = 300
SECONDS_TO_START = 60

STOCK = (
    *("-Xmx1G", "-Xms1G", "-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20"),
    *("-XX:InitiatingHeapOccupancyPercent=35", "-XX:+ExplicitGCInvokesConcurrent"),
)
"""What kafka-server-start.sh and kafka-run-class.sh give when nobody says otherwise."""
SMALL = ("-Xmx128m", "-Xms128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
SMALL_SETTINGS = {"log.cleaner.dedupe.buffer.size": "4194304"}  # of 128 MB, which do not fit
COMMON = ("-Djava.awt.headless=true", "-Djava.net.preferIPv4Stack=true")
ONE = (
    *("offsets.topic.replication.factor", "transaction.state.log.replication.factor"),
    *("transaction.state.log.min.isr", "share.coordinator.state.topic.replication.factor"),
    *("share.coordinator.state.topic.min.isr",),
)
FEW = (
    *("offsets.topic.num.partitions", "transaction.state.log.num.partitions"),
    *("share.coordinator.state.topic.num.partitions",),
)
SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "group.initial.rebalance.delay.ms": "0",
    "auto.create.topics.enable": "false",
    # After a kill a broker waits until its former self has expired: 9 s if nobody says otherwise.
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "200",
    **dict.fromkeys(ONE, "1"),
    **dict.fromkeys(FEW, "4"),
}
LOGGING = """rootLogger.level = warn
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss} %level %c{2}: %m%n
rootLogger.appenderRef.console.ref = console
"""
READY = "headrace-ready"
"""The topic of the record that says that the broker has started."""

_WATCH = """
read line && exit
kill -KILL "$1"
rm -rf "$2"
"""


class Unavailable(Exception):
    """What a broker needs and could not be had, in words for whoever runs the tests."""


# -- the jars ----------


def jars() -> Path:
    """Give the folder with the broker's jars, fetched and checked; raises `Unavailable`."""
    folder = cache_folder().parent / f"kafka-{hashlib.sha256(JARS.read_bytes()).hexdigest()[:12]}"
    if not _wrong(folder):
        return folder
    say(f"fetching Kafka's {len(_listed())} jars, about 45 MB, once")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="kafka-", dir=folder.parent) as work:
            fetched = Path(work, "jars")
            _fetch(Path(work), fetched)
            if wrong := _wrong(fetched):
                raise Unavailable(f"Kafka's jars are not those of {JARS.name}: {', '.join(wrong)}")
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # another process was faster
                fetched.rename(folder)
    except OSError as error:
        raise Unavailable(f"Kafka's jars could not be kept: {error}") from error
    return folder


def java() -> str:
    """Give the Java that runs the broker; raises `Unavailable`."""
    try:
        return find_java()[0]
    except NoJava as error:
        raise Unavailable(f"no Kafka without Java: {error}") from error


def _listed() -> dict[str, tuple[str, str, str, str]]:
    """File name: organisation, name, revision, digest."""
    lines = (line.split() for line in JARS.read_text().splitlines())
    split = ((*name.split(":"), digest) for digest, name in lines)
    return {f"{name}-{rev}.jar": (group, name, rev, digest) for group, name, rev, digest in split}


def _wrong(folder: Path) -> list[str]:
    """The jars that are absent or are others than those listed."""
    return [
        name
        for name, (_, _, _, digest) in _listed().items()
        if not (folder / name).exists()
        or hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest
    ]


def _fetch(work: Path, into: Path) -> None:
    """Let Ivy fetch what is listed, and nothing that these would want beyond it."""
    spec = importlib.util.find_spec("pyspark")
    places = list(spec.submodule_search_locations or ()) if spec else []
    ivy = next((jar for place in places for jar in Path(place).glob("jars/ivy-*.jar")), None)
    if ivy is None:
        raise Unavailable("Kafka's jars are fetched by the Ivy of pyspark: pip install pyspark")
    wanted = "".join(
        f'<dependency org="{group}" name="{name}" rev="{rev}" transitive="false" conf="default">'
        f'<artifact name="{name}" type="jar"/></dependency>'
        for group, name, rev, _ in _listed().values()
    )
    (work / "ivy.xml").write_text(
        '<ivy-module version="2.0"><info organisation="headrace" module="kafka"/><configurations>'
        f'<conf name="default"/></configurations><dependencies>{wanted}</dependencies></ivy-module>'
    )
    command = [java(), f"-Divy.default.ivy.user.dir={work}", "-jar", str(ivy), "-m2compatible"]
    command += ["-cache", str(work / "cache"), "-ivy", str(work / "ivy.xml")]
    command += ["-retrieve", f"{into}/[artifact]-[revision].[ext]"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=SECONDS_TO_FETCH
        )
    except subprocess.TimeoutExpired as error:
        waited = f"no answer in {SECONDS_TO_FETCH} s"
        raise Unavailable(f"Kafka's jars could not be fetched: {waited}") from error
    if done.returncode:
        found = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise Unavailable(f"Kafka's jars could not be fetched: {'; '.join(found[-2:])}")


def say(text: str) -> None:
    """Talk to whoever waits."""
    print(text, file=sys.stderr, flush=True)


# -- the broker ----------


class Broker(Watched):
    """One broker in a folder of its own, which is removed on leaving.

    As a context manager it is started on entering and ended on leaving. The port stays the same
    when it is killed and started again. Its settings are Kafka's own names.
    """

    def __init__(
        self,
        *,
        stock: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Find what is needed (raises `Unavailable`); `start` formats the folder and starts."""
        if importlib.util.find_spec("confluent_kafka") is None:
            raise Unavailable("no client for Kafka: pip install confluent-kafka")
        super().__init__()
        self._jars, self._java = jars(), java()
        self.flags = STOCK if stock else SMALL
        self.settings = SETTINGS | ({} if stock else SMALL_SETTINGS) | dict(settings or {})
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-kafka-")).absolute()
        self.data = self.folder / "data"
        self.ports: tuple[int, int] | None = None

    def __enter__(self) -> Broker:
        try:
            self.start()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._leave()

    @property
    def address(self) -> str:
        """Where clients connect, `bootstrap.servers`."""
        assert self.ports, "the broker was never started"
        return f"127.0.0.1:{self.ports[0]}"

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process, "the broker does not run"
        return self._process.pid

    def client(self, **settings: Any) -> dict[str, Any]:
        """Settings for a client of confluent-kafka, `_` for `.`; quiet, and quick to come back."""
        base: dict[str, Any] = {"bootstrap.servers": self.address, "log_level": 0}
        soon = {"reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 100}
        return base | soon | {name.replace("_", "."): value for name, value in settings.items()}

    def start(self) -> None:
        """Start the broker and wait until it has acknowledged a record."""
        assert not self.running, "the broker runs already"
        fixed = self.ports
        for _ in range(5):
            clients, controllers = free_ports(2)
            self.ports = fixed or (clients, controllers)
            self._configure()
            self._launch()
            if self._answers():
                return
            self._reap()
            if fixed or "Address already in use" not in self.log():
                break
        raise RuntimeError(f"Kafka did not start:\n{self.log()[-4000:]}")

    def stop(self) -> None:
        """End the broker in order and wait for it."""
        if self.running:
            assert self._process is not None
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        self._reap()

    def kill(self) -> None:
        """End the broker at once with SIGKILL, and wait until it is gone."""
        if self.running:
            os.kill(self.pid, signal.SIGKILL)
        self._reap()

    def log(self) -> str:
        """What the broker has written since it was last started."""
        log = self.folder / "log"
        return log.read_text(errors="replace") if log.exists() else ""

    def create_topic(self, name: str, partitions: int = 1, **settings: str) -> None:
        """Make a topic; its settings are Kafka's, `_` for `.`."""
        from confluent_kafka.admin import AdminClient
        from confluent_kafka.cimpl import NewTopic

        config = {key.replace("_", "."): value for key, value in settings.items()}
        topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=config)
        admin = AdminClient(self.client())  # held: without it the answer would never come
        admin.create_topics([topic])[name].result(30)

    def tool(self, main: str, *arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run one of Kafka's own programs to its end, by the name of its class."""
        command = [self._java, *self._logging(), "-cp", f"{self._jars}/*", main, *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=self.folder, **more
        )

    def _logging(self) -> list[str]:
        return [*COMMON, f"-Dlog4j2.configurationFile={self.folder / 'log4j2.properties'}"]

    def _configure(self) -> None:
        """Write the settings; a new folder is formatted."""
        assert self.ports
        clients, controllers = (f"127.0.0.1:{port}" for port in self.ports)
        fixed = {
            "listeners": f"PLAINTEXT://{clients},CONTROLLER://{controllers}",
            "advertised.listeners": f"PLAINTEXT://{clients}",
            "controller.quorum.voters": f"1@{controllers}",
            "log.dirs": str(self.data),
        }
        lines = (f"{name}={value}\n" for name, value in (self.settings | fixed).items())
        config = self.folder / "server.properties"
        config.write_text("".join(lines))
        (self.folder / "log4j2.properties").write_text(LOGGING)
        if not (self.data / "meta.properties").exists():
            self._format(config)

    def _format(self, config: Path) -> None:
        """Format the folder; what the tool writes is kept beside the jars: a start of Java saved.

        All brokers have the same cluster id then, and none can reach another.
        """
        kept = self._jars / "formatted"
        if kept.exists():
            shutil.copytree(kept, self.data)
            return
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        command = ("kafka.tools.StorageTool", "format", f"--cluster-id={cluster}")
        done = self.tool(*command, "-c", str(config))
        if done.returncode:
            raise RuntimeError(f"Kafka did not format its folder:\n{done.stdout}{done.stderr}")
        with (
            contextlib.suppress(OSError),  # another process was faster
            tempfile.TemporaryDirectory(dir=self._jars) as work,
        ):
            shutil.copytree(self.data, Path(work, "formatted")).rename(kept)

    def _launch(self) -> None:
        jars = ["-cp", f"{self._jars}/*", "kafka.Kafka", "server.properties"]
        with open(self.folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                [self._java, *self.flags, *self._logging(), *jars],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._watch(_WATCH, str(self.folder))

    def _answers(self) -> bool:
        """Wait until a record is acknowledged, or until the broker has ended."""
        assert self.ports
        give_up = time.monotonic() + SECONDS_TO_START
        while self.running and time.monotonic() < give_up:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.ports[0]), 1).close()
                break
            time.sleep(0.01)
        while self.running and time.monotonic() < give_up:
            if self._acknowledges():
                return self.running
        return False

    def _acknowledges(self) -> bool:
        from confluent_kafka import KafkaException, Producer

        acknowledged: list[bool] = []
        producer = Producer(self.client(acks="all", linger_ms=0, message_timeout_ms=2000))
        try:
            if READY not in producer.list_topics(timeout=2).topics:
                self.create_topic(READY)
            producer.produce(READY, b"", on_delivery=lambda bad, _: acknowledged.append(not bad))
            producer.flush(3)
        except KafkaException:  # not yet: it answers before it can do all
            time.sleep(0.02)
        return any(acknowledged)

    def _leave(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def main() -> int:
    """Fetch the jars, so that a test need not; says what could not be had."""
    try:
        java(), jars()
    except Unavailable as error:
        say(f"{error}; no comparison with a Kafka broker")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
