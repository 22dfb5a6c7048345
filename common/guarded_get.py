"""GET for images, so that no request can make the server look around in a network of its own.

A host is looked up once. Unless its operator allows it, every address that the name has must be public; the connection
goes to an address that was checked, while `Host`, SNI and certificate stay the name's. Each redirect starts anew. What
is refused is told in one sentence whatever the reason, before a packet has gone to where it must not go: the answer
says nothing about what listens there. The log has the reason.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Sequence
from contextlib import aclosing
from functools import cache
from typing import Final, NamedTuple

import httpx
from loguru import logger

from common.addresses import IPAddress, Resolver, is_own, is_public, parse_address
from common.image_urls import MAX_IMAGE_BYTES

MAX_REDIRECTS: Final = 3
MAX_URL_LENGTH: Final = 8192
# Of hosts that are not allowed by name: no mail server or database answers there.
PUBLIC_PORTS: Final = (80, 443)

_NAME: Final = re.compile(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
# What resolvers read as an IPv4 address in some old spelling, as 0x7f.1 or 2130706433.
_NUMERIC: Final = re.compile(r"(.*\.)?(\d+|0x[0-9a-f]*)")
# Of Cache-Control (RFC 9111).
_MUST_BE_ASKED: Final = re.compile(r"\b(no-store|no-cache|max-age=0)\b", re.IGNORECASE)
_HEADERS: Final = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "Waypoint"}


class Refusal(Exception):
    """Why something is not fetched, for the log."""


class Answer(NamedTuple):
    """
    Attributes:
        lasts: the host does not say that it has to be asked each time.
    """

    data: bytes
    lasts: bool


class _Target(NamedTuple):
    """Where one request goes."""

    url: httpx.URL
    host: str  # in lower case, without a dot at its end
    addresses: Sequence[IPAddress]  # checked


class GuardedGet:
    """
    Args:
        allowed_hosts: names and addresses that may be anything, on any port.
        resolver: looks names up.
    """

    def __init__(self, allowed_hosts: Sequence[str], resolver: Resolver) -> None:
        self._allowed_names = frozenset(allowed_hosts)
        self._allowed_addresses = {address for host in allowed_hosts if (address := parse_address(host)) is not None}
        self._resolve = resolver

    async def image(self, url: str) -> Answer:
        """What the host sends, which has to declare it to be an image. Raises `Refusal`."""
        try:
            return await self._follow(url)
        except (httpx.HTTPError, ssl.SSLError, OSError) as error:
            raise Refusal(f"{type(error).__name__} {error}") from error

    async def _follow(self, url: str) -> Answer:
        """The answer at the end of the redirects."""
        for _ in range(MAX_REDIRECTS + 1):
            answer = await self._get(await self._target(url))
            if isinstance(answer, Answer):
                return answer
            if httpx.URL(url).scheme == "https" and answer.scheme == "http":
                raise Refusal(f"{answer.host}: a redirect from https to http")
            url = str(answer)
        raise Refusal(f"more than {MAX_REDIRECTS} redirects")

    async def _target(self, text: str) -> _Target:
        """Where the request for a URL may go."""
        url, host = _parse(text)
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise Refusal(f"{host} has no address: {error}") from error
        if not addresses:
            raise Refusal(f"{host} has no address")
        if host not in self._allowed_names:
            foreign = [address for address in addresses if address not in self._allowed_addresses]
            for address in foreign:
                if not is_public(address) or is_own(address):
                    raise Refusal(
                        f"{host} has the address {address}, which is not public. To fetch from there, add the host to "
                        "network.fetch_allowed_hosts."
                    )
            if foreign and port not in PUBLIC_PORTS:
                raise Refusal(f"{host}: port {port} is none of {', '.join(map(str, PUBLIC_PORTS))}")
        return _Target(url, host, addresses)

    async def _get(self, target: _Target) -> Answer | httpx.URL:
        """The image, or where the host says that it is."""
        # A transport without a client around it: no cookies, no proxy, no netrc, no redirects of its own.
        async with httpx.AsyncHTTPTransport(verify=_certificates(), trust_env=False) as transport:
            for address in target.addresses[:-1]:
                try:
                    return await _request(transport, target, address)
                except httpx.ConnectError as error:
                    logger.debug("{} does not answer at {}: {}", target.host, address, error)
            return await _request(transport, target, target.addresses[-1])


async def _request(transport: httpx.AsyncHTTPTransport, target: _Target, address: IPAddress) -> Answer | httpx.URL:
    request = httpx.Request(
        "GET",
        target.url.copy_with(host=str(address)),
        headers={**_HEADERS, "Host": target.url.netloc.decode("ascii")},
        extensions={"sni_hostname": target.host},  # which the certificate has to name
    )
    async with aclosing(await transport.handle_async_request(request)) as response:
        if response.is_redirect:
            return _redirected(target.url, response.headers.get("location", ""))
        if response.status_code != httpx.codes.OK:
            raise Refusal(f"{target.host} answered with {response.status_code}")
        lasts = _MUST_BE_ASKED.search(response.headers.get("cache-control", "")) is None
        return Answer(await _read(response, target.host), lasts)


def _redirected(url: httpx.URL, location: str) -> httpx.URL:
    try:
        return url.join(location)
    except (httpx.InvalidURL, UnicodeError) as error:
        raise Refusal(f"{url.host}: a redirect to no URL: {error}") from error


async def _read(response: httpx.Response, host: str) -> bytes:
    content_type = response.headers.get("content-type", "")
    if not content_type.lower().startswith("image/"):
        raise Refusal(f"{host} sent no image, but {content_type!r}")
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise Refusal(f"{host} compressed the image, although it was asked not to")
    body = bytearray()
    async for chunk in response.aiter_raw():  # whatever length was declared
        body += chunk
        if len(body) > MAX_IMAGE_BYTES:
            raise Refusal(f"{host} sent more than {MAX_IMAGE_BYTES // 1024**2} MB")
    return bytes(body)


def _parse(text: str) -> tuple[httpx.URL, str]:
    """A URL, and its host in lower case without a dot at its end."""
    try:
        if len(text) > MAX_URL_LENGTH:
            raise Refusal("the URL is too long")
        url = httpx.URL(text.strip())
    except (httpx.InvalidURL, UnicodeError) as error:
        raise Refusal(f"no URL: {error}") from error
    host = url.raw_host.decode("ascii").lower().rstrip(".")
    if url.scheme not in ("http", "https"):
        raise Refusal(f"{host}: the scheme {url.scheme}")
    if url.userinfo:
        raise Refusal(f"{host}: a URL with a user's name")
    if url.port is not None and not 0 < url.port < 1 << 16:
        raise Refusal(f"{host}: the port {url.port}")
    if parse_address(host) is None and (not _NAME.fullmatch(host) or _NUMERIC.fullmatch(host)):
        raise Refusal(f"{host!r} is no name of a host")
    return url, host


@cache
def _certificates() -> ssl.SSLContext:
    """Authorities of servers that are trusted."""
    return httpx.create_ssl_context(trust_env=False)
