"""Errors as they travel over HTTP: application/problem+json (RFC 9457), from the catalogue."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace import errors

MEDIA_TYPE = "application/problem+json"

_STATUS: tuple[tuple[type[errors.HeadraceError], int], ...] = (
    (errors.UnknownTopic, 404),
    (errors.UnknownPart, 404),
    (errors.UnknownPath, 404),
    (errors.ForeignRequest, 403),
    (errors.BadFeedToken, 410),
    (errors.WaitTimeout, 504),
    (errors.NotYetThere, 504),
    (errors.NotRunning, 503),
    (errors.Conflict, 409),
    (errors.RequestFailed, 500),
    (errors.UsageError, 400),
    (errors.TransientError, 503),
)


def status_of(error: errors.HeadraceError) -> int:
    """The status code of an error; the first kind that fits."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def problem(error: errors.HeadraceError, status: int | None = None) -> dict[str, Any]:
    """The body. `type` leads to the explanation of the error, on this server."""
    told = error.to_json()
    return {
        "type": f"/errors/{error.code}" if error.code else "about:blank",
        "title": error.title or error.fact,
        "status": status or status_of(error),
        "detail": error.fact,
        **{name: told[name] for name in ("code", "place", "why", "fix", "details")},
    }


def response(error: errors.HeadraceError, status: int | None = None) -> Response:
    """The answer to a request that ended in this error."""
    body = problem(error, status)
    return JSONResponse(body, body["status"], media_type=MEDIA_TYPE)


async def handle(request: Request, error: Exception) -> Response:
    """Whatever a request ended in."""
    if isinstance(error, errors.HeadraceError):
        return response(error)
    place = f"{request.method} {request.url.path}"
    kind = type(error).__name__
    return response(errors.RequestFailed(f"{kind}: {error}"[:300], place=place))


async def not_there(request: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    status = int(getattr(error, "status_code", 404))
    place = f"{request.method} {request.url.path}"
    fact = "there is nothing here" if status == 404 else f"{request.method} is not for this path"
    answer = response(errors.UnknownPath(fact, place=place), status)
    answer.headers.update(getattr(error, "headers", None) or {})  # `Allow`, which belongs to a 405
    return answer
