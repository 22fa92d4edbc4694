"""Who may ask: this machine's programs, and pages that came from here. Nobody else.

The server listens on the loopback, without passwords. Your browser is on this machine too, and it
runs what other sites send it. Three doors are shut, before anything else looks at a request:

- *Another name for this address* (DNS rebinding): a site lets its name point to 127.0.0.1, and to
  the browser our answers are its own. Then `Host` is the site's name: only names of the loopback
  are taken.
- *A foreign page that asks*: a browser says so, in `Origin` and `Sec-Fetch-Site`. Only our own
  origin may ask; from elsewhere one may follow a link to the page, no more.
- *A foreign form that posts*, in a browser too old to say so: whatever changes something must say
  `Content-Type: application/json`, which a form cannot.

No answer allows another origin to read it (no CORS), none may be framed, and the page runs scripts
and styles of its own only. ASGI all the way, so that a feed is not buffered.
"""

from __future__ import annotations

import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace import errors
from headrace.serving.problems import response

LOOPBACK = re.compile(r"(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d{1,5})?", re.IGNORECASE)
SAFE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def refusal(method: str, path: str, headers: Headers) -> str:
    """Why a request is not answered; empty: it is."""
    hosts = headers.getlist("host")
    if len(hosts) != 1 or not LOOPBACK.fullmatch(hosts[0]):
        return f"the host '{', '.join(hosts)[:80]}' is not this machine"
    origin = headers.get("origin")
    if origin is not None and origin.lower() != f"http://{hosts[0]}".lower():
        return f"the page that asks came from {origin[:80]}"
    site = headers.get("sec-fetch-site", "none")
    link = path == "/" and method in SAFE and headers.get("sec-fetch-mode") == "navigate"
    if site not in ("same-origin", "none") and not link:
        return "the page that asks came from another site"
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if method not in SAFE and kind != "application/json":
        return f"{method} without Content-Type: application/json"
    return ""


class Guard:
    """Refuses what is foreign, and adds headers that keep our answers ours."""

    def __init__(self, app: ASGIApp) -> None:
        """Stand before an application."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no web sockets: the server closes the connection

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        why = refusal(scope["method"], scope["path"], Headers(scope=scope))
        if why:
            refused = response(errors.ForeignRequest(why, place=scope["path"]))
            await refused(scope, receive, sending)
            return
        await self._app(scope, receive, sending)
