"""Whether the client library is there: it is an extra of the package, and imported when needed."""

from __future__ import annotations

import sys

from headrace.errors import NoPsycopg


def need_psycopg() -> None:
    """Say how to install the client library, if it is not."""
    try:
        import psycopg  # noqa: F401
    except ModuleNotFoundError as error:
        raise NoPsycopg("psycopg is not installed", place=sys.executable) from error
    except ImportError as error:  # it is, but without the C library that it calls
        what = " ".join(str(error).split())
        raise NoPsycopg(f"psycopg cannot be loaded: {what}", place=sys.executable) from error
