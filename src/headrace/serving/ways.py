"""What a path is: its method, its parameters, its answer; and the OpenAPI document of a list."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace import errors
from headrace.serving.problems import MEDIA_TYPE

_READ: dict[str, Callable[[str], Any]] = {"string": str, "integer": int, "number": float}


BODY = {
    "requestBody": {
        "description": "An empty object: a request that does something must say that it is JSON.",
        "required": True,
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
}


@dataclass(frozen=True)
class Parameter:
    """Something that a path takes."""

    name: str
    text: str
    kind: str = "string"
    where: str = "query"
    least: int | None = None
    most: int | None = None
    choices: tuple[str, ...] = ()
    many: bool = False
    pattern: str = ""
    """What its values look like, for who reads the document; `read` does not look at it."""

    def read(self, text: str) -> Any:
        """Understand a value."""
        try:
            value = _READ[self.kind](text)
        except ValueError:
            raise self._bad(text, f"it is a value of type {self.kind}") from None
        if self.choices and value not in self.choices:
            raise self._bad(text, f"it is one of {', '.join(self.choices)}")
        if self.most is not None and not (self.least or 0) <= value <= self.most:
            raise self._bad(text, f"it is from {self.least} to {self.most}")
        return value

    def _bad(self, text: str, why: str) -> errors.BadParameter:
        return errors.BadParameter(f"{self.name}={text[:60]}", place=self.name, why=why)

    def to_json(self) -> dict[str, Any]:
        """As OpenAPI has it."""
        schema: dict[str, Any] = {"type": self.kind}
        bounds = {"minimum": self.least, "maximum": self.most, "enum": list(self.choices) or None}
        schema |= {"pattern": f"^({self.pattern})$"} if self.pattern else {}
        schema |= {name: value for name, value in bounds.items() if value is not None}
        if self.many:
            schema = {"type": "array", "items": schema}
        return {
            "name": self.name,
            "in": self.where,
            "description": self.text,
            "required": self.where == "path",
            "schema": schema,
        }


Handler = Callable[[Any], Awaitable[Response]]


@dataclass(frozen=True)
class Way:
    """A path with a method."""

    method: str
    path: str
    summary: str
    handler: Handler
    parameters: tuple[Parameter, ...] = ()
    media: str = "application/json"
    status: int = 200

    def arguments(self, request: Request) -> dict[str, Any]:
        """The parameters of a request, checked."""
        known = {one.name: one for one in self.parameters}
        found: dict[str, Any] = {one.name: [] if one.many else None for one in self.parameters}
        given = [*request.path_params.items(), *request.query_params.multi_items()]
        for name, text in given:
            if name not in known:
                fix = errors.nearest(name, known) or "see /openapi.json"
                raise errors.BadParameter(f"'{name}' is not known here", place=name, fix=fix)
            value = known[name].read(str(text))
            found[name] = [*found[name], value] if known[name].many else value
        return found


def openapi(ways: Iterable[Way]) -> dict[str, Any]:
    """The OpenAPI document."""
    refused = {
        "description": "What went wrong",
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
    paths: dict[str, Any] = {}
    for way in ways:
        kind = "object" if way.media.endswith("json") else "string"
        told = {
            "description": way.summary,
            "content": {way.media: {"schema": {"type": kind}}},
        }
        paths.setdefault(way.path.replace(":path}", "}"), {})[way.method.lower()] = {
            "summary": way.summary,
            "parameters": [one.to_json() for one in way.parameters],
            "responses": {str(way.status): told, "default": refused},
            **(BODY if way.method == "POST" else {}),
        }
    strings = ("type", "title", "detail", "code", "place", "why", "fix")
    properties: dict[str, Any] = {name: {"type": "string"} for name in strings}
    properties |= {"status": {"type": "integer"}, "details": {"type": "object"}}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": version("headrace")},
        "paths": paths,
        "components": {"schemas": {"Problem": schema}},
    }
