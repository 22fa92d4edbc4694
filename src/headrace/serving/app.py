"""The HTTP interface: every path, what it takes and what it answers, in one list.

The list makes both the router and the OpenAPI document, so the two cannot differ. Handlers check
what they are given and ask `Site`, in a thread, since the log blocks. Reads with `after=TOKEN`
(read your own writes, R-B12) do not occupy a thread while they wait: they look again whenever the
log has news.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from headrace import errors
from headrace.runtime.tokens import LSN
from headrace.serving import problems
from headrace.serving.feed import STARTS, TOKEN, Feed
from headrace.serving.guard import Guard
from headrace.serving.live import Live, Status
from headrace.serving.news import News
from headrace.serving.site import LIMIT_MAX, Site
from headrace.serving.ways import Handler, Parameter, Way, openapi

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog
    from headrace.runtime.project import Project

WEB = Path(__file__).parent / "web"
MEDIA = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
TIMEOUT_MAX = 60.0
LOOK_SECONDS = 0.2
"""So often a target is asked by who waits for it."""
SSE = "text/event-stream"


@dataclass
class Here:
    """What a handler has at hand."""

    site: Site
    news: News
    live: Live
    request: Request
    given: dict[str, Any]
    """The parameters, checked."""


# --- handlers -------------------------------------------------------------------------------------


def asked(look: Callable[[Site, dict[str, Any]], Any], status: int = 200) -> Handler:
    """A handler that asks the site something; with the parameters, in a thread."""

    async def handler(here: Here) -> Response:
        return JSONResponse(await asyncio.to_thread(look, here.site, here.given), status)

    return handler


async def get_status(here: Here) -> Response:
    """The status."""
    return JSONResponse(await here.live.status())


async def get_events(here: Here) -> Response:
    """The status, pushed."""
    return _stream(here, here.live.stream())


async def get_table_rows(here: Here) -> Response:
    """Rows of a table, by key or all."""
    return await _rows(here, here.given["topic"], view=False)


async def get_view_rows(here: Here) -> Response:
    """Rows of a view."""
    await asyncio.to_thread(here.site.view, here.given["view"])
    return await _rows(here, here.given["view"], view=True)


async def _rows(here: Here, name: str, *, view: bool) -> Response:
    given, site, limit = here.given, here.site, here.given["limit"] or 100
    if given["page"] is not None:
        return JSONResponse(await asyncio.to_thread(site.rows, name, 0, given["page"], limit))
    await asyncio.to_thread(site.topic, name)
    timeout = 5.0 if given["timeout"] is None else given["timeout"]
    at = await here.news.until(
        lambda: site.at(name, given["at"], given["after"], view=view), timeout
    )
    if given.get("key"):
        return JSONResponse(await asyncio.to_thread(site.get, name, given["key"], at))
    return JSONResponse(await asyncio.to_thread(site.rows, name, at, None, limit))


async def get_wait(here: Here) -> Response:
    """Wait until a target, or a topic, has a token; without one, all that is in the log now."""
    name, after, timeout = (here.given[one] for one in ("of", "after", "timeout"))
    look = partial(here.site.shows, name, here.site.log.position if after is None else after)
    return JSONResponse(
        await here.news.until(look, 5.0 if timeout is None else timeout, LOOK_SECONDS)
    )


async def get_feed(here: Here) -> Response:
    """The feed of a topic."""
    token = here.request.headers.get("last-event-id") or here.given["after"]
    start = here.given["start"] or "rows"
    feed = await asyncio.to_thread(Feed, here.site.log, here.given["topic"], token, start)
    return _stream(here, here.news.stream(feed))


def _stream(here: Here, events: AsyncIterator[bytes]) -> Response:
    if here.request.method == "HEAD":
        return Response(media_type=SSE)
    return StreamingResponse(events, media_type=SSE, headers={"X-Accel-Buffering": "no"})


async def get_parts(here: Here) -> Response:
    """The parts."""
    status = await here.live.status()
    return JSONResponse({"supervisor": status.get("supervisor"), "parts": status.get("parts", [])})


async def get_error(here: Here) -> Response:
    """Explain an error."""
    found = errors.catalogue().get(here.given["code"].upper())
    if found is None:
        raise errors.UnknownPath(f"there is no error '{here.given['code'][:40]}'", place="/errors")
    return JSONResponse(
        {"code": found.code, "title": found.title, "why": found.why, "fix": found.fix}
    )


async def get_openapi(_here: Here) -> Response:
    """This list."""
    return JSONResponse(openapi(WAYS))


async def get_page(here: Here) -> Response:
    """The page and its files."""
    name = here.given.get("file") or "index.html"
    path = WEB / name
    if path.suffix not in MEDIA or path.name != name or not path.is_file():
        raise errors.UnknownPath("there is nothing here", place=f"/web/{name[:60]}")
    headers = {"Cache-Control": "no-cache"}
    return FileResponse(path, media_type=MEDIA[path.suffix], headers=headers)


# --- the list -------------------------------------------------------------------------------------


def _in_path(name: str, text: str) -> Parameter:
    return Parameter(name, text, where="path")


def _position(name: str, text: str) -> Parameter:
    return Parameter(name, text, "integer", least=0, most=(1 << 63) - 1)


_TOPIC = _in_path("topic", "The name of a topic.")
_VIEW = _in_path("view", "The name of a view, with that of its pipeline: shop.revenue.")
_PART = _in_path("part", "The name of a part: capture/shop, pipelines, follower/shop/main, page.")
_LIMIT = Parameter("limit", "At most so many rows; 100.", "integer", least=1, most=LIMIT_MAX)
_PAGE = Parameter("page", "`next` of the answer before: go on from there.", pattern=TOKEN.pattern)
_WAITING = (
    Parameter(
        "after", "Read your own writes: wait until this is there. A position, or lsn:0/16B3748.",
        pattern=rf"\d{{1,18}}|{LSN.pattern}",
    ),
    Parameter(
        "timeout", "How long to wait for `at` or `after`, in seconds; 5.",
        "number", least=0, most=int(TIMEOUT_MAX),
    ),
)  # fmt: skip
_READING = (
    _position("at", "As it was at this position of the log; by default as it is now."),
    *_WAITING,
    _LIMIT,
    _PAGE,
)  # fmt: skip

WAYS = (
    Way("GET", "/v1/status", "How everything is.", get_status),
    Way("GET", "/v1/events", "How everything is, pushed each second.", get_events, media=SSE),
    Way("GET", "/v1/topics", "All topics.", asked(lambda site, _: {"topics": site.topics()})),
    Way(
        "GET", "/v1/topics/{topic}", "One topic: kind, key, columns, rows.",
        asked(lambda site, given: site.topic(given["topic"])), (_TOPIC,),
    ),
    Way(
        "GET", "/v1/topics/{topic}/rows", "Rows of a topic in the order of their entries.",
        asked(
            lambda site, given: site.topic_rows(
                given["topic"], given["after"], given["through"], given["page"],
                given["limit"] or 100,
            )
        ),
        (
            _TOPIC,
            _position("after", "Only entries after this position."),
            _position("through", "Only entries up to this position."),
            _LIMIT,
            _PAGE,
        ),
    ),
    Way(
        "GET", "/v1/tables/{topic}/rows", "Rows of a topic by key, or all in the order of keys.",
        get_table_rows,
        (
            _TOPIC,
            Parameter("key", "A value, or a JSON array or object of the key's columns.", many=True),
            *_READING,
        ),
    ),
    Way("GET", "/v1/views", "All views.", asked(lambda site, _: {"views": site.views()})),
    Way(
        "GET", "/v1/views/{view}", "One view, with its source text.",
        asked(lambda site, given: site.view(given["view"])), (_VIEW,),
    ),
    Way("GET", "/v1/views/{view}/rows", "Rows of a view.", get_view_rows, (_VIEW, *_READING)),
    Way(
        "GET", "/v1/wait/{of:path}", "Wait until a target, a view or a topic has a token.",
        get_wait, (_in_path("of", "A follower (shop/main), or a topic."), *_WAITING),
    ),
    Way(
        "GET", "/v1/feed/{topic}", "First the current rows, then every change (SSE).", get_feed,
        (
            _TOPIC,
            Parameter("start", "What comes first; the current rows.", choices=STARTS),
            Parameter(
                "after", "Go on after this token; Last-Event-ID goes before it.",
                pattern=TOKEN.pattern,
            ),
        ),
        media=SSE,
    ),
    Way("GET", "/v1/parts", "The parts of the project.", get_parts),
    Way(
        "POST", "/v1/parts/{part:path}/kill", "Kill a part.",
        asked(lambda site, given: site.ask("kill", given["part"])), (_PART,),
    ),
    Way(
        "POST", "/v1/parts/{part:path}/restart", "Restart a part.",
        asked(lambda site, given: site.ask("restart", given["part"])), (_PART,),
    ),
    Way("GET", "/v1/verify", "The last verifications.", asked(lambda site, _: site.verified())),
    Way(
        "POST", "/v1/verify/{name:path}", "Start a verification.",
        asked(lambda site, given: site.start_verify(given["name"]), 202),
        (_in_path("name", "A follower (shop/main), or the topic of a captured table."),),
        status=202,
    ),
    Way("GET", "/errors/{code}", "What an error means.", get_error, (_in_path("code", "HR-..."),)),
    Way("GET", "/openapi.json", "This document.", get_openapi),
    Way("GET", "/", "The page.", get_page, media="text/html"),
    Way(
        "GET", "/web/{file}", "A file of the page.", get_page, (_in_path("file", "Its name."),),
        media="*/*",
    ),
)  # fmt: skip


def make_app(
    project: Project, status: Callable[[Project, EmbeddedLog], Status] | None = None
) -> Starlette:
    """The application of a project; it opens the log when it starts and closes it when it ends."""
    import headrace as hr

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        log = await asyncio.to_thread(hr.connect, str(project.log))
        site = Site(project, log, status)
        app.state.news, app.state.live = News(log), Live(site.status)
        app.state.site = site
        try:
            yield
        finally:
            stop(app)
            await asyncio.to_thread(app.state.news.join)
            log.close()

    def routed(way: Way) -> Route:
        async def endpoint(request: Request) -> Response:
            state = request.app.state
            here = Here(state.site, state.news, state.live, request, way.arguments(request))
            return await way.handler(here)

        return Route(way.path, endpoint, methods=[way.method], name=way.summary)

    handlers: dict[Any, Any] = {
        404: problems.not_there,
        405: problems.not_there,
        errors.HeadraceError: problems.handle,
        Exception: problems.handle,
    }
    return Starlette(
        routes=[routed(way) for way in WAYS],
        middleware=[Middleware(Guard)],
        exception_handlers=handlers,
        lifespan=lifespan,
        max_body_size=64 << 10,
    )


def stop(app: Starlette) -> None:
    """End all feeds, so that the server can stop; in the event loop."""
    if hasattr(app.state, "site"):
        app.state.news.stop()
        app.state.live.stop()
