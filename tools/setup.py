"""Makes .venv and installs what requirements.lock names; called by ./run, standard library only.

uv does the installing, from its cache when everything is there (`--offline`), else from the index.
Where uv is not on the PATH it comes from the lock itself, with pip or, if there is none, ensurepip.
`.venv/.ready` is written last: it repeats what was installed and where, so that ./run can compare
it without starting Python. Where it is missing an installation was broken off, and uv would take a
package of which half is there for installed; where it names another place, the programs in
`.venv/bin` call the Python there: both are made anew. A lock file lets several first calls at once
wait for one another.

The package itself is installed so that its sources are used, and its build hook compiles the short
cut in C (`hatch_build.py`). Without a C compiler one is fetched; else all goes on in Python.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
READY = VENV / ".ready"
LOCK = ROOT / "requirements.lock"
CC_LOCK = ROOT / "requirements-cc.lock"
DECIDING = ("pyproject.toml", "hatch_build.py", "src/headrace/log/embedded/shortcut.c")
SHORT_CUT = ROOT / "src/headrace/log/embedded/_shortcut.abi3.so"
TURN = VENV / ".setup-lock"  # not .venv/.lock: uv itself locks that one, and would wait for us
CACHE = VENV / ".uv-cache"  # where home cannot be written

# Imported by every command or test and not yet compiled by uv: without this, each start pays again
# where PYTHONDONTWRITEBYTECODE is set.
COMPILED = (
    *("_pytest", "click", "hypothesis", "numpy", "pandas"),
    *("polars", "psycopg", "py4j", "pyarrow", "pyspark", "xxhash"),
)

# pyspark comes as source, 450 MB: packing its wheel without compressing it halves the time.
DIST_CONFIG = "[bdist_wheel]\ncompression = stored\n"


def main() -> int:
    try:
        set_up()
    except subprocess.CalledProcessError as error:
        say(f"failed: {' '.join(map(str, error.cmd))}")
    except OSError as error:
        say(f"failed: {error}")
    except KeyboardInterrupt:
        say("interrupted; the next call begins again")
        return 130
    else:
        return 0
    return 1


def set_up() -> None:
    VENV.mkdir(exist_ok=True)
    with open(TURN, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another call is installing, waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        before, now = READY.read_bytes() if READY.exists() else b"", wanted()
        if before == now and PYTHON.exists():
            return
        READY.unlink(missing_ok=True)
        install(anew=not before.startswith(f"{ROOT}\n".encode()) or not usable())
        write_whole(READY, now)  # not what has changed meanwhile


def wanted() -> bytes:
    """Give what ./run compares: the place, as a venv cannot be moved, and what decides all else."""
    files = (LOCK, *(ROOT / name for name in DECIDING))
    return b"".join([f"{ROOT}\n".encode(), *(file.read_bytes() for file in files)])


def install(*, anew: bool) -> None:
    started = time.monotonic()
    if anew:
        make_venv()
    uv = find_uv()
    before = set(packages())
    write_whole(VENV / "dist.cfg", DIST_CONFIG.encode())
    pip_install(uv, "--require-hashes", "-r", str(LOCK))
    again = ["--force-reinstall", "--no-deps", "--no-build-isolation"]  # or uv would not compile
    pip_install(uv, *again, "-e", str(ROOT))
    short_cut(uv)
    new = sorted(set(packages()) - before)
    if new:
        say(f"installed {len(new)} packages: {', '.join(new)}")
        compile_bytecode()
    say(f"ready after {time.monotonic() - started:.1f} s")


def usable() -> bool:
    """Whether .venv has a Python that runs, of a version we can use."""
    check = "import sys; sys.exit(sys.version_info < (3, 11))"
    return PYTHON.exists() and subprocess.run([PYTHON, "-c", check], check=False).returncode == 0


def make_venv() -> None:
    say(f"making .venv with Python {sys.version.split()[0]}")
    try:
        import venv
    except ImportError:
        need("this Python has no module venv")
    for path in set(VENV.iterdir()) - {TURN, CACHE}:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    venv.create(VENV, symlinks=True, with_pip=False)


def need(fact: str) -> NoReturn:
    say(fact)
    say("install it (Debian, Ubuntu: apt-get install python3-venv), then call again")
    sys.exit(1)


def find_uv() -> str:
    """Find uv on the PATH or in .venv; else put the version of the lock into .venv."""
    own = VENV / "bin" / "uv"
    found = shutil.which("uv") or shutil.which(own)
    if found:
        return found
    if importlib.util.find_spec("pip"):
        pip = [sys.executable, "-m", "pip", "--python", str(PYTHON)]
    elif importlib.util.find_spec("ensurepip"):
        subprocess.run([PYTHON, "-m", "ensurepip"], check=True, stdout=subprocess.DEVNULL)
        pip = [str(PYTHON), "-m", "pip"]
    else:
        need("this Python has neither pip nor ensurepip, and uv is not on the PATH")
    say("installing uv")
    entry = re.search(r"^uv==.*\n(?:    .*\n)*", LOCK.read_text(), re.MULTILINE)
    assert entry, "requirements.lock names uv"
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pinned:
        pinned.write(entry.group())
        pinned.flush()
        quiet = ["--quiet", "--no-cache-dir", "--no-deps", "--require-hashes", "-r", pinned.name]
        subprocess.run([*pip, "install", *quiet], check=True)
    return str(own)


def short_cut(uv: str) -> None:
    """Where hatch_build.py could not compile, say why, or fetch what it lacks: a C compiler."""
    if SHORT_CUT.exists():  # it leaves no old one
        return
    reason = not_compiled()
    if reason.startswith("no C compiler"):
        say("no C compiler here: fetching one (ziglang)")
        with contextlib.suppress(subprocess.CalledProcessError):
            pip_install(uv, "--require-hashes", "-r", str(CC_LOCK), quiet=True)
            reason = not_compiled()
    if reason:
        say(f"without the short cut in C: {reason}; to try again: ./run python hatch_build.py")


def not_compiled() -> str:
    """Compile the short cut; give why that could not be, or nothing."""
    command = [PYTHON, ROOT / "hatch_build.py"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.stderr.strip()


def pip_install(uv: str, *arguments: str, quiet: bool = False) -> None:
    """Install with uv from its cache, else from the index, else with pip: it may know a mirror."""
    command = [uv, "pip", "install", "--quiet", "--python", str(PYTHON), *arguments]
    environment = uv_environment()
    for way in ([*command, "--offline"], command):
        done = subprocess.run(way, env=environment, check=False, capture_output=True, text=True)
        if done.returncode == 0:
            return
    if not quiet:
        say(f"uv failed:\n{done.stderr.strip()}")
    pip = [sys.executable, "-m", "pip", "--python", str(PYTHON), "install", "--quiet", *arguments]
    subprocess.run(pip, check=True, capture_output=quiet)


def uv_environment() -> dict[str, str]:
    """Trust the certificates this machine trusts; keep the cache where we may write."""
    environment = {"UV_PYTHON_DOWNLOADS": "never", "DIST_EXTRA_CONFIG": str(VENV / "dist.cfg")}
    trusted = ssl.get_default_verify_paths()
    if trusted.cafile or (trusted.capath and os.listdir(trusted.capath)):
        environment |= {"UV_SYSTEM_CERTS": "true"}
    if not home_cache_writable():
        environment |= {"UV_CACHE_DIR": str(CACHE)}
    return environment | os.environ


def home_cache_writable() -> bool:
    """Whether uv can keep its cache where it does by default."""
    cache = os.environ.get("XDG_CACHE_HOME") or (os.environ.get("HOME", "") + "/.cache")
    try:
        os.makedirs(f"{cache}/uv", exist_ok=True)
        with tempfile.TemporaryFile(dir=f"{cache}/uv"):
            return os.path.isabs(cache)
    except OSError:
        return False


def site() -> Path:
    return next(VENV.glob("lib/python3.*/site-packages"))


def packages() -> list[str]:
    """Name and version of each installed package, read from the folder names."""
    return [path.name.removesuffix(".dist-info") for path in site().glob("*.dist-info")]


def compile_bytecode() -> None:
    folders = [str(site() / name) for name in COMPILED if (site() / name).exists()]
    command = [str(PYTHON), "-m", "compileall", "-q", "-j", "0", "-x", "/tests/", *folders]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def write_whole(path: Path, content: bytes) -> None:
    beside = path.with_suffix(".new")
    beside.write_bytes(content)
    beside.replace(path)


def say(text: str) -> None:
    print(f"run: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
