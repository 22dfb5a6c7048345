"""Images loaded by their URL, so that no request can make the server look around in a network of its own.

A host is looked up once. Unless its operator allows it, every address that the name has must be public; the connection
goes to an address that was checked, while `Host`, SNI and certificate stay the name's. Each redirect starts anew. What
is refused is told in one sentence whatever the reason, before a packet has gone to where it must not go: the answer
says nothing about what listens there. The log has the reason.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import cache, partial
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import httpx
from loguru import logger

from common.addresses import IPAddress, is_own, is_public, parse_address
from common.config_models import NetworkConfig
from common.errors import InvalidRequest, Unsupported
from common.image_files import read_image_file
from common.images import MAX_IMAGE_BYTES, MAX_REQUEST_BYTES, decode_data_url, scheme_of
from common.limits import MAX_IMAGES

MAX_REDIRECTS: Final = 3
MAX_URL_LENGTH: Final = 8192
FETCH_SECONDS: Final = 20.0  # look-up, redirects and body together
# Of hosts that are not allowed by name: no mail server or database answers there.
PUBLIC_PORTS: Final = (80, 443)

Resolver: TypeAlias = Callable[[str, int], Awaitable[Sequence[IPAddress]]]

_REFUSED: Final = (
    "The image could not be fetched from its URL. It has to be an image of at most "
    f"{MAX_IMAGE_BYTES // 1024**2} MB that a public host sends within {FETCH_SECONDS:.0f} seconds; the server's log "
    "says more. An image can also be sent in the request itself, as a data: URL."
)
_NAME: Final = re.compile(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
# What resolvers read as an IPv4 address in some old spelling, as 0x7f.1 or 2130706433.
_NUMERIC: Final = re.compile(r"(.*\.)?(\d+|0x[0-9a-f]*)")
_HEADERS: Final = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "Waypoint"}


class _Refusal(Exception):
    """Why something is not fetched, for the log."""


class ImageSource(NamedTuple):
    """
    Attributes:
        param: path of the URL in the request, for errors.
    """

    url: str
    param: str


class _Target(NamedTuple):
    """Where one request goes."""

    url: httpx.URL
    host: str  # in lower case, without a dot at its end
    addresses: Sequence[IPAddress]  # checked


async def resolve(host: str, port: int) -> list[IPAddress]:
    """The addresses of a host, as the system knows them. Raises OSError."""
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_resolvers(), look_up)
    return [ipaddress.ip_address(address[0]) for *_, address in found]


@cache
def _resolvers() -> ThreadPoolExecutor:
    # Their own, since a name server that does not answer holds a thread for longer than anybody waits for it.
    return ThreadPoolExecutor(8, thread_name_prefix="resolver")


class ImageFetcher:
    """Loads the images of requests.

    Args:
        enabled: False refuses http(s) URLs.
        allowed_hosts: names and addresses that may be anything, on any port.
        folder: with files that requests may name.
        resolver: looks names up.
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        allowed_hosts: Sequence[str] = (),
        folder: Path | None = None,
        resolver: Resolver = resolve,
    ) -> None:
        self._enabled = enabled
        self._allowed_names = frozenset(allowed_hosts)
        self._allowed_addresses = {address for host in allowed_hosts if (address := parse_address(host)) is not None}
        self._folder = folder
        self._resolve = resolver

    @classmethod
    def of(cls, settings: NetworkConfig) -> ImageFetcher:
        return cls(
            enabled=not settings.disable_fetch_requests,
            allowed_hosts=settings.fetch_allowed_hosts,
            folder=Path(settings.image_dir) if settings.image_dir else None,
        )

    async def load(self, sources: Sequence[ImageSource]) -> list[bytes]:
        """The images of one request, encoded as they come; `common.images.decode_image` reads them.

        They are loaded one after the other, so that a request holds one connection.

        Raises:
            InvalidRequest: they are too many or too large together, a URL is of no image, or it could not be fetched.
            Unsupported: fetching is turned off, or files may not be named.
        """
        if len(sources) > MAX_IMAGES:
            raise InvalidRequest(
                f"The request has {len(sources)} images; at most {MAX_IMAGES} are taken.", param=sources[-1].param
            )
        images: list[bytes] = []
        left = MAX_REQUEST_BYTES
        for url, param in sources:
            match scheme_of(url, param):
                case "data":  # in a thread: the loop shall not wait for megabytes of base64
                    image = await asyncio.to_thread(decode_data_url, url, param)
                case "file":
                    image = await asyncio.to_thread(read_image_file, url, self._folder, param)
                case _:
                    image = await self.fetch(url, param)
            left -= len(image)
            if left < 0:
                raise InvalidRequest(
                    f"The images of the request are larger than {MAX_REQUEST_BYTES // 1024**2} MB together.",
                    param=param,
                )
            images.append(image)
        return images

    async def fetch(self, url: str, param: str) -> bytes:
        """What a host sends for an http(s) URL and declares to be an image.

        Raises:
            InvalidRequest: it was not fetched, for whichever reason.
            Unsupported: fetching is turned off.
        """
        if not self._enabled:
            raise Unsupported(
                "Images are not fetched by URL, as network.disable_fetch_requests says; send the image itself, as a "
                "data: URL.",
                param=param,
            )
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                return await self._follow(url)
        except _Refusal as refusal:
            reason = str(refusal)
        except TimeoutError:
            reason = f"it took longer than {FETCH_SECONDS:.0f} seconds"
        except (httpx.HTTPError, ssl.SSLError, OSError) as error:
            reason = f"{type(error).__name__} {error}"
        logger.info("An image of a request was not fetched: {}", reason)
        raise InvalidRequest(_REFUSED, param=param)

    async def _follow(self, url: str) -> bytes:
        """The answer at the end of the redirects."""
        for _ in range(MAX_REDIRECTS + 1):
            answer = await self._get(await self._target(url))
            if isinstance(answer, bytes):
                return answer
            if httpx.URL(url).scheme == "https" and answer.scheme == "http":
                raise _Refusal(f"{answer.host}: a redirect from https to http")
            url = str(answer)
        raise _Refusal(f"more than {MAX_REDIRECTS} redirects")

    async def _target(self, text: str) -> _Target:
        """Where the request for a URL may go."""
        url, host = _parse(text)
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise _Refusal(f"{host} has no address: {error}") from error
        if not addresses:
            raise _Refusal(f"{host} has no address")
        if host not in self._allowed_names:
            foreign = [address for address in addresses if address not in self._allowed_addresses]
            for address in foreign:
                if not is_public(address) or is_own(address):
                    raise _Refusal(
                        f"{host} has the address {address}, which is not public. To fetch from there, add the host to "
                        "network.fetch_allowed_hosts."
                    )
            if foreign and port not in PUBLIC_PORTS:
                raise _Refusal(f"{host}: port {port} is none of {', '.join(map(str, PUBLIC_PORTS))}")
        return _Target(url, host, addresses)

    async def _get(self, target: _Target) -> bytes | httpx.URL:
        """The image, or where the host says that it is."""
        # A transport without a client around it: no cookies, no proxy, no netrc, no redirects of its own.
        async with httpx.AsyncHTTPTransport(verify=_certificates(), trust_env=False) as transport:
            for address in target.addresses[:-1]:
                try:
                    return await _request(transport, target, address)
                except httpx.ConnectError as error:
                    logger.debug("{} does not answer at {}: {}", target.host, address, error)
            return await _request(transport, target, target.addresses[-1])


async def _request(transport: httpx.AsyncHTTPTransport, target: _Target, address: IPAddress) -> bytes | httpx.URL:
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
            raise _Refusal(f"{target.host} answered with {response.status_code}")
        return await _read(response, target.host)


def _redirected(url: httpx.URL, location: str) -> httpx.URL:
    try:
        return url.join(location)
    except (httpx.InvalidURL, UnicodeError) as error:
        raise _Refusal(f"{url.host}: a redirect to no URL: {error}") from error


async def _read(response: httpx.Response, host: str) -> bytes:
    content_type = response.headers.get("content-type", "")
    if not content_type.lower().startswith("image/"):
        raise _Refusal(f"{host} sent no image, but {content_type!r}")
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise _Refusal(f"{host} compressed the image, although it was asked not to")
    body = bytearray()
    async for chunk in response.aiter_raw():  # whatever length was declared
        body += chunk
        if len(body) > MAX_IMAGE_BYTES:
            raise _Refusal(f"{host} sent more than {MAX_IMAGE_BYTES // 1024**2} MB")
    return bytes(body)


def _parse(text: str) -> tuple[httpx.URL, str]:
    """A URL, and its host in lower case without a dot at its end."""
    try:
        if len(text) > MAX_URL_LENGTH:
            raise _Refusal("the URL is too long")
        url = httpx.URL(text.strip())
    except (httpx.InvalidURL, UnicodeError) as error:
        raise _Refusal(f"no URL: {error}") from error
    host = url.raw_host.decode("ascii").lower().rstrip(".")
    if url.scheme not in ("http", "https"):
        raise _Refusal(f"{host}: the scheme {url.scheme}")
    if url.userinfo:
        raise _Refusal(f"{host}: a URL with a user's name")
    if url.port is not None and not 0 < url.port < 1 << 16:
        raise _Refusal(f"{host}: the port {url.port}")
    if parse_address(host) is None and (not _NAME.fullmatch(host) or _NUMERIC.fullmatch(host)):
        raise _Refusal(f"{host!r} is no name of a host")
    return url, host


@cache
def _certificates() -> ssl.SSLContext:
    """Authorities of servers that are trusted."""
    return httpx.create_ssl_context(trust_env=False)
