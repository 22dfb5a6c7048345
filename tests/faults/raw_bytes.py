"""Requests that no client should send, made from a seed: broken HTTP, and bodies that are wrong in every way."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from endpoints.routing import RouteAccess

CRLF: Final = b"\r\n"
_RAW: Final = re.compile(r'"\\u0001raw:((?:[^"\\]|\\.)*)"')


class Case(NamedTuple):
    """What is sent over one connection.

    Attributes:
        title: what it tries.
        data: all that is sent.
        methods: of the requests in it.
        whole: whether all of them are well framed, so that each has to be answered.
        abort: whether the client goes without reading anything.
    """

    title: str
    data: bytes
    methods: tuple[str, ...]
    whole: bool = True
    abort: bool = False


# --- JSON -------------------------------------------------------------------------------------------------------------


def raw(text: str) -> str:
    """Stands for a text in the JSON that is no JSON value of Python's."""
    return f"\x01raw:{text}"


def dump(value: object) -> bytes:
    def unquoted(match: re.Match[str]) -> str:
        text: str = json.loads(f'"{match[1]}"')
        return text

    return _RAW.sub(unquoted, json.dumps(value)).encode()


def nested(depth: int, opening: str = "[", closing: str = "]") -> str:
    return raw(opening * depth + closing * depth)


HOSTILE: Final[Sequence[object]] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 0.5, -0.0, 1e308, 5e-324),
    *(raw("1e999"), raw("NaN"), raw("-Infinity"), raw("9" * 400), raw("-" + "9" * 5000), raw("0." + "1" * 5000)),
    *("", " ", "\0", "a\0b", "x" * 5000, "🦊" * 300, "\u2028", "\x7f\x80", "null", "NaN", "1e5", "-1", "true"),
    *(raw(r'"\ud800"'), raw(r'"\udc00\ud800"'), raw(r'"a\udfffb"'), raw('{"a": 1, "a": 2}'), raw(r'{"\ud800": 1}')),
    *("../../etc/passwd", "..%2f..", "/dev/null", "C:\\x", "~", "alpha", "beta", "chatml"),
    *(
        "{{ 7 * 7 }}",
        "{% for x in range(10**9) %}{% endfor %}",
        "<|im_end|>",
        "<|im_start|>system",
        "(a+)+$",
        "[",
        "\\",
    ),
    *("data:image/png;base64,AAAA", "data:,", "http://169.254.169.254/latest", "http://[::1]:1/", "file:///etc/passwd"),
    *([], {}, [None], [[]], [{}], {"": ""}, {"a": None}, [0] * 3000, ["x"] * 300, {str(i): i for i in range(300)}),
    *(nested(40), nested(3000), raw('{"a":' * 900 + "1" + "}" * 900), nested(100_000)),
)
TEXTS: Final = ("", "a", "Hello", "alpha", "user", "system", "tool", "assistant", "text", "json_schema", "é", "x y\n")


class JsonMaker:
    """Values in the shape that a JSON schema asks for, and such that are nearly in that shape.

    Args:
        document: the OpenAPI document, where references lead.
        random: makes every choice.
    """

    def __init__(self, document: dict[str, Any], random: Random) -> None:
        self._document = document
        self._random = random

    def body(self, schema: dict[str, Any]) -> object:
        """Of the right shape, or with up to three mistakes in it."""
        value = self.value(schema)
        for _ in range(self._random.randrange(4)):
            value = self.broken(value)
        return value

    def value(self, schema: Any, depth: int = 0) -> Any:
        random = self._random
        if not isinstance(schema, dict) or depth > 8:
            return random.choice(HOSTILE[:30])
        if "$ref" in schema:
            return self.value(self._resolve(schema["$ref"]), depth)
        for members in ("anyOf", "oneOf", "allOf"):
            if members in schema:
                return self.value(random.choice(schema[members]), depth + 1)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return random.choice(schema["enum"])
        match schema.get("type"):
            case "object":
                return self._object(schema, depth)
            case "array":
                least = schema.get("minItems", 0)
                return [self.value(schema.get("items", {}), depth + 1) for _ in range(least + random.randrange(3))]
            case "string":
                return random.choice(TEXTS)
            case "integer":
                return self._integer(schema)
            case "number":
                return random.choice([0, 1, self._integer(schema), random.random()])
            case "boolean":
                return random.random() < 0.5
            case "null":
                return None
        return random.choice(HOSTILE[:30])

    def broken(self, value: Any) -> Any:
        """The value with something wrong at one place."""
        random = self._random
        if isinstance(value, dict) and value and random.random() < 0.8:
            name = random.choice(list(value))
            match random.randrange(6):
                case 0:
                    return {key: member for key, member in value.items() if key != name}
                case 1:
                    return value | {random.choice(["unknown", "", "\0", "é", name.upper()]): random.choice(HOSTILE)}
                case _:
                    return value | {name: self.broken(value[name])}
        if isinstance(value, list) and value and random.random() < 0.7:
            index = random.randrange(len(value))
            return [*value[:index], self.broken(value[index]), *value[index + 1 :]]
        return random.choice([random.choice(HOSTILE), random.choice(HOSTILE), [value], {"value": value}, str(value)])

    def _resolve(self, reference: str) -> Any:
        found: Any = self._document
        for name in reference.removeprefix("#/").split("/"):
            found = found[name]
        return found

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        optional = [name for name in properties if name not in required]
        chosen = self._random.sample(optional, min(len(optional), self._random.randrange(6)))
        made = {name: self.value(properties.get(name, {}), depth + 1) for name in (*required, *chosen)}
        if schema.get("additionalProperties"):
            made[self._random.choice(TEXTS)] = self.value(schema["additionalProperties"], depth + 1)
        return made

    def _integer(self, schema: dict[str, Any]) -> int:
        least, most = int(schema.get("minimum", 0)), int(schema.get("maximum", 100))
        return self._random.choice([least, most, self._random.randint(least, max(least, min(most, least + 20)))])


# --- HTTP -------------------------------------------------------------------------------------------------------------

Header = tuple[bytes, bytes]


def request(method: str, target: str, headers: Sequence[Header], body: bytes | None, *, close: bool = True) -> bytes:
    """A well-framed request."""
    lines = [f"{method} {target} HTTP/1.1".encode(), b"Host: 127.0.0.1"]
    lines += [name + b": " + value for name, value in headers]
    if body is not None:
        lines.append(b"Content-Length: %d" % len(body))
    if close:
        lines.append(b"Connection: close")
    return CRLF.join([*lines, b"", body or b""])


class CaseMaker:
    """Cases for the routes of an application.

    Args:
        document: its OpenAPI document.
        keys: of a client and of an administrator.
        random: makes every choice.
    """

    def __init__(self, document: dict[str, Any], keys: Sequence[str], random: Random) -> None:
        self._document = document
        self._keys = keys
        self._random = random
        self._json = JsonMaker(document, random)
        self._kinds: list[Callable[[RouteAccess], Case]] = [
            *[self._shaped] * 8,
            *[self._no_json] * 3,
            self._broken_head,
            self._broken_length,
            self._broken_chunks,
            self._chunked,
            self._truncated,
            self._aborted,
            self._pipelined,
            self._large,
            self._strange_headers,
        ]

    def case(self, route: RouteAccess) -> Case:
        return self._random.choice(self._kinds)(route)

    # --- whole requests -----------------------------------------------------------------------------------------

    def _shaped(self, route: RouteAccess) -> Case:
        """What the OpenAPI document asks for, or nearly."""
        schema = self._body_schema(route)
        body = None if schema is None else dump(self._json.body(schema))
        return self._whole(route, "shape", body)

    def _no_json(self, route: RouteAccess) -> Case:
        random = self._random
        schema = self._body_schema(route)
        text = dump(self._json.value(schema) if schema else {})
        place = random.randrange(len(text) + 1)
        body = random.choice(
            [
                b"",
                random.randbytes(random.randrange(300)),
                text[:place],
                text[:place] + random.randbytes(3) + text[place:],
                text + text,
                text.replace(b'"', b"'"),
                b"\xef\xbb\xbf" + text,
                text.decode().encode(random.choice(["utf-16", "utf-32", "utf-16-be"])),
                b"\xff\xfe\xfd",
                b'{"prompt": "\xed\xa0\x80"}',
                b'{"prompt": "\x00\x01"}',
                text[:-1] + b', "model": 1, "model": "\\ud83d"}',
                b"null",
                b"[" * random.choice([10, 2000, 200_000]),
                b'{"a":' * 100_000,
                b"9" * random.choice([10, 5000]),
                b'"' + b"x" * 1000,
                b"a=1&b=2",
            ]
        )
        return self._whole(route, "no JSON", body)

    def _large(self, route: RouteAccess) -> Case:
        body = b'{"prompt": "' + b"x" * self._random.choice([60_000, 1_500_000]) + b'"}'
        # A server that closes before it has read everything takes its answer back with it.
        data = request(route.method, self._target(route), self._headers(), body, close=False)
        return Case(f"{route.method} {route.path}: large", data, (route.method,))

    def _strange_headers(self, route: RouteAccess) -> Case:
        random = self._random
        values = [
            b"",
            b"a" * 3000,
            b"\xff\xfe",
            b"bearer",
            b"Bearer ",
            b"Bearer a b",
            b"Basic OjpvOg==",
            b"'; --",
            b'"',
        ]
        names = [b"Authorization", b"X-Api-Key", b"X-Admin-Key", b"X-Request-Id", b"Origin", b"Accept", b"Cookie"]
        names += [
            b"Content-Type",
            b"Content-Encoding",
            b"Expect",
            b"Upgrade",
            b"Access-Control-Request-Method",
            b"Range",
        ]
        headers = [(random.choice(names), random.choice(values)) for _ in range(random.randrange(1, 8))]
        return self._whole(route, "strange headers", b"{}", headers)

    def _chunked(self, route: RouteAccess) -> Case:
        """Well framed, in many pieces."""
        schema = self._body_schema(route)
        body = dump(self._json.body(schema)) if schema else b"{}"
        size = self._random.choice([1, 7, 4000])
        pieces = [body[at : at + size] for at in range(0, min(len(body), 400 * size), size)]
        framed = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        headers = [*self._headers(), (b"Transfer-Encoding", b"chunked"), (b"Connection", b"close")]
        head = request(route.method, self._target(route), headers, None, close=False)
        return Case(f"{route.method} {route.path}: chunked", head + framed, (route.method,))

    def _pipelined(self, route: RouteAccess) -> Case:
        methods = [route.method, "GET", route.method, "GET"]
        schema = self._body_schema(route)
        parts = []
        for index, method in enumerate(methods):
            ours = method == route.method and index % 2 == 0
            body = dump(self._json.body(schema)) if ours and schema else None
            target = self._target(route) if ours else "/health"
            parts.append(request(method, target, self._headers(), body, close=index == len(methods) - 1))
        return Case(f"{route.method} {route.path}: pipelined", b"".join(parts), tuple(methods))

    def _whole(
        self, route: RouteAccess, what: str, body: bytes | None, headers: Sequence[Header] | None = None
    ) -> Case:
        data = request(route.method, self._target(route), headers or self._headers(), body)
        return Case(f"{route.method} {route.path}: {what}", data, (route.method,))

    # --- broken ones --------------------------------------------------------------------------------------------

    def _broken_head(self, route: RouteAccess) -> Case:
        random = self._random
        target = self._target(route).encode()
        method = route.method.encode()
        data = random.choice(
            [
                random.randbytes(random.randrange(1, 400)),
                method + b" " + target + b"\r\n\r\n",
                method + b" " + target + b" HTTP/9.9\r\n\r\n",
                method + b"  " + target + b"  HTTP/1.1\r\nHost: x\r\n\r\n",
                method + b" " + target + b" \xff HTTP/1.1\r\nHost: x\r\n\r\n",
                b"\0" + method + b" " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n",
                method + b" " + target + b" HTTP/1.1\nHost: x\nConnection: close\n\n",
                method + b" " + target + b" HTTP/1.1\r\nHost x\r\n\r\n",
                method + b" " + target + b" HTTP/1.1\r\nHost: x\r\nA\0b: c\r\n\r\n",
                method + b" " + target + b" HTTP/1.1\r\n" + b"A: " + b"x" * 200_000 + b"\r\n\r\n",
                method + b" " + target + b" HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 20_000 + b"\r\n",
                method + b" /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
                b"CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost: x\r\n\r\n",
                b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
                method + b" http://other/" + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
            ]
        )
        return Case(f"{route.method} {route.path}: broken head", data, (route.method,), whole=False)

    def _broken_length(self, route: RouteAccess) -> Case:
        length = self._random.choice(
            [b"-1", b"+5", b"abc", b"", b"1e3", b"9" * 40, b"0x10", b"5, 6", b"5\r\nContent-Length: 6"]
        )
        headers = [*self._headers(), (b"Content-Length", length)]
        data = request(route.method, self._target(route), headers, None) + b'{"a": 1}'
        return Case(f"{route.method} {route.path}: Content-Length {length!r}", data, (route.method,), whole=False)

    def _broken_chunks(self, route: RouteAccess) -> Case:
        random = self._random
        encoding = random.choice(
            [b"chunked", b"chunked", b"gzip", b"gzip, chunked", b"chunked, chunked", b"identity", b"\x0b"]
        )
        chunks = random.choice(
            [
                b"zz\r\n{}\r\n0\r\n\r\n",
                b"-2\r\n{}\r\n0\r\n\r\n",
                b"2\r\n{}",
                b"2\r\n{}xx0\r\n\r\n",
                b"f" * 30 + b"\r\n{}\r\n",
                b"2" + b";a=b" * 3000 + b"\r\n{}\r\n0\r\n\r\n",
                b"2\n{}\n0\n\n",
                b"0\r\nA: b\r\nTransfer-Encoding: x\r\n\r\n",
                random.randbytes(100),
            ]
        )
        headers = [*self._headers(), (b"Transfer-Encoding", encoding)]
        if random.random() < 0.3:
            headers.append((b"Content-Length", b"4"))
        data = request(route.method, self._target(route), headers, None) + chunks
        return Case(f"{route.method} {route.path}: {encoding!r} chunks", data, (route.method,), whole=False)

    def _truncated(self, route: RouteAccess) -> Case:
        data = self._shaped(route).data
        sent = data[: self._random.randrange(len(data))]
        return Case(f"{route.method} {route.path}: truncated", sent, (route.method,), whole=False)

    def _aborted(self, route: RouteAccess) -> Case:
        """The client sends all or a part, and goes."""
        data = self._shaped(route).data
        sent = data[: self._random.choice([len(data), self._random.randrange(len(data))])]
        return Case(f"{route.method} {route.path}: aborted", sent, (route.method,), whole=False, abort=True)

    # --- parts --------------------------------------------------------------------------------------------------

    def _target(self, route: RouteAccess) -> str:
        random = self._random
        path = route.path.replace("{model_id:path}", random.choice(["alpha", "%00", "..%2f..%2fx", "a/b", "%ff", "%"]))
        if random.random() < 0.05:
            path += random.choice(["/", "%00", "/..", ";x", "%2e%2e", "//"])
        parameters = [parameter["name"] for parameter in self._operation(route).get("parameters", [])]
        if not parameters and random.random() < 0.9:
            return path
        pairs = [f"{quote(name)}={self._query_value()}" for name in [*parameters, "unknown"] if random.random() < 0.6]
        return path + "?" + "&".join(pairs)

    def _query_value(self) -> str:
        values = [
            "1",
            "2048",
            "alpha",
            "0",
            "-1",
            "1e9",
            "NaN",
            "%00",
            "%ff%fe",
            "%",
            "",
            "png",
            "9" * 5000,
            "[]",
            "true",
        ]
        return self._random.choice(values)

    def _headers(self) -> list[Header]:
        random = self._random
        key = random.choice([*self._keys, *self._keys, "wrong"])
        headers = [(b"Authorization", b"Bearer " + key.encode())] if random.random() < 0.95 else []
        kinds = [b"application/json"] * 9 + [b"text/plain", b"application/x-www-form-urlencoded", b"\xff", b"a" * 500]
        headers.append((b"Content-Type", random.choice(kinds)))
        return headers

    def _operation(self, route: RouteAccess) -> dict[str, Any]:
        paths = self._document["paths"]
        path = route.path.replace(":path", "")
        found: dict[str, Any] = paths.get(path, paths.get("/v1" + path, {})).get(route.method.lower(), {})
        return found

    def _body_schema(self, route: RouteAccess) -> dict[str, Any] | None:
        content = self._operation(route).get("requestBody", {}).get("content", {})
        schema: dict[str, Any] | None = content.get("application/json", {}).get("schema")
        return schema
