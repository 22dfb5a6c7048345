"""Images by URL: where they may come from, and that nothing else is ever asked."""

from __future__ import annotations

import asyncio
import base64
import io
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path

import pytest
from loguru import logger
from PIL import Image

from common import fetch, guarded_get
from common.addresses import IPAddress, resolve
from common.config_models import NetworkConfig
from common.errors import InvalidRequest, Unsupported
from common.fetch import ImageFetcher, ImageSource
from common.images import decode_image
from tests.certificates import make_certificate
from tests.common.test_addresses import NOT_PUBLIC

LOOPBACK = ip_address("127.0.0.1")
PUBLIC = ip_address("8.8.8.8")


def png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (3, 2)).save(buffer, "PNG")
    return buffer.getvalue()


PNG = png()
DATA_URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"


def response(body: bytes = PNG, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *(headers or ["Content-Type: image/png"])]
    return "\r\n".join([*lines, "", ""]).encode() + body


def redirect(location: str) -> bytes:
    return response(b"", f"Location: {location}", status="302 Found")


class Host:
    """A server on 127.0.0.1 that sends prepared bytes, by path, and notes each request's head."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {"/": response()}
        self.heads: list[str] = []
        self.port = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        writer.write(self.answers.get(head.split()[1].partition("?")[0], response(status="404 Not Found")))
        await writer.drain()
        writer.close()

    @asynccontextmanager
    async def running(self, context: ssl.SSLContext | None = None) -> AsyncIterator[Host]:
        server = await asyncio.start_server(self.answer, "127.0.0.1", 0, ssl=context)
        self.port = server.sockets[0].getsockname()[1]
        async with server:
            yield self


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    async with Host().running() as running:
        yield running


class Names:
    """A resolver with answers of its own: each look-up of a name takes the next one, the last stays."""

    def __init__(self, **answers: Sequence[IPAddress]) -> None:
        self.answers = {name.replace("_", "."): list(found) for name, found in answers.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[IPAddress]:
        self.asked.append(host)
        found = self.answers.get(host)
        if found is None:
            raise OSError("no such host")
        return [found.pop(0) if len(found) > 1 else found[0]]


def fetcher(allowed: Sequence[str] = ("pictures.test",), **names: Sequence[IPAddress]) -> tuple[ImageFetcher, Names]:
    resolver = Names(pictures_test=[LOOPBACK], **names)
    return ImageFetcher(allowed_hosts=allowed, resolver=resolver), resolver


@pytest.fixture
def never_connects(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Connections that are tried, of which there are none."""
    tried: list[object] = []

    async def connect(*arguments: object, **named: object) -> None:
        tried.append(arguments)
        raise OSError("a connection")

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", connect)
    return tried


async def refused(fetching: ImageFetcher, url: str) -> str:
    """The reason in the log; what the client is told is the same for all."""
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), format="{message}")
    try:
        with pytest.raises(InvalidRequest) as caught:
            await fetching.fetch(url, "messages.0.content.0.image_url")
    finally:
        logger.remove(sink)
    assert (caught.value.message, caught.value.param) == (fetch._REFUSED, "messages.0.content.0.image_url")
    (line,) = [line for line in lines if "was not fetched" in line]
    return line


# --- what is fetched ------------------------------------------------------------------------------------------------


async def test_an_image_of_an_allowed_host(host: Host) -> None:
    fetching, names = fetcher()
    data = await fetching.fetch(f"HTTP://Pictures.test:{host.port}/?a=b#c", "url")
    assert decode_image(data, "url").size == (3, 2)
    assert names.asked == ["pictures.test"]  # once: what it answers next time is of no account
    (head,) = host.heads
    assert head.startswith("GET /?a=b HTTP/1.1\r\n")
    assert f"host: pictures.test:{host.port}\r\n" in head.lower()
    assert "accept-encoding: identity\r\n" in head.lower()


async def test_the_address_that_was_checked_is_the_one_that_is_asked(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name whose address changes between check and use (DNS rebinding)."""

    def look_up(name: str | bytes, *rest: object, **named: object) -> None:
        raise AssertionError(f"{name!r} is looked up again")

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    monkeypatch.setattr(guarded_get, "is_public", lambda address: address == LOOPBACK)
    monkeypatch.setattr(guarded_get, "is_own", lambda address: False)
    monkeypatch.setattr(guarded_get, "PUBLIC_PORTS", (host.port,))
    fetching, names = fetcher((), rebind_test=[LOOPBACK, ip_address("10.0.0.1")])
    assert await fetching.fetch(f"http://rebind.test:{host.port}/", "url") == PNG
    assert "10.0.0.1" in await refused(fetching, f"http://rebind.test:{host.port}/?again")
    assert names.asked == ["rebind.test", "rebind.test"]


async def test_neither_proxies_nor_passwords_of_the_environment(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".netrc").write_text("default login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert await fetcher()[0].fetch(f"http://pictures.test:{host.port}/", "url") == PNG
    assert "authorization" not in host.heads[0].lower()


async def test_redirects_are_followed_and_carry_nothing(host: Host) -> None:
    for step in range(4):
        host.answers[f"/{step}"] = response(
            b"", f"Location: {step + 1}", "Set-Cookie: session=secret", status="302 Found"
        )
    host.answers["/4"] = response()
    fetching, names = fetcher()
    assert await fetching.fetch(f"http://pictures.test:{host.port}/1", "url") == PNG
    assert names.asked == ["pictures.test"] * 4  # checked each time
    assert not any("cookie" in head.lower() or "referer" in head.lower() for head in host.heads)
    assert "more than 3 redirects" in await refused(fetching, f"http://pictures.test:{host.port}/0")


async def test_another_address_is_tried_where_the_first_does_not_answer(host: Host) -> None:
    async def resolver(name: str, port: int) -> list[IPAddress]:
        return [ip_address("127.0.0.2"), LOOPBACK]  # nothing listens at the first one

    fetching = ImageFetcher(allowed_hosts=["pictures.test"], resolver=resolver)
    assert await fetching.fetch(f"http://pictures.test:{host.port}/", "url") == PNG


async def test_a_certificate_has_to_name_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = make_certificate(tmp_path, "pictures.test")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.certfile, certificate.keyfile)
    trusting = ssl.create_default_context(cafile=str(certificate.certfile))
    monkeypatch.setattr(guarded_get, "_certificates", lambda: trusting)
    async with Host().running(context) as host:
        fetching, _ = fetcher(("pictures.test", "other.test"), other_test=[LOOPBACK])
        assert await fetching.fetch(f"https://pictures.test:{host.port}/", "url") == PNG
        assert "certificate" in await refused(fetching, f"https://other.test:{host.port}/")
        host.answers["/moved"] = redirect(f"http://pictures.test:{host.port}/")
        assert "from https to http" in await refused(fetching, f"https://pictures.test:{host.port}/moved")


async def test_the_system_is_asked_for_names() -> None:
    assert await resolve("127.0.0.1", 80) == [LOOPBACK]


# --- what is kept ---------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = 1000.0
        monkeypatch.setattr(fetch, "monotonic", lambda: self.time)


async def test_a_chat_that_goes_on_needs_its_image_once(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is some minutes old, and each URL for itself; what is refused is not kept."""
    clock = Clock(monkeypatch)
    fetching, _ = fetcher()
    url = f"http://pictures.test:{host.port}/"
    for _ in range(3):
        assert await fetching.load([ImageSource(url, "url")]) == [PNG]
        clock.time += 0.4 * fetch.KEPT_SECONDS
    assert len(host.heads) == 1
    host.answers["/"] = response(b"newer")
    assert await fetching.fetch(url, "url") == b"newer"
    assert await fetching.fetch(f"{url}?other", "url") == b"newer"
    assert len(host.heads) == 3
    for _ in range(2):
        assert "404" in await refused(fetching, f"{url}missing")
    assert len(host.heads) == 5
    host.answers.clear()
    assert await fetching.fetch(url, "url") == b"newer"  # which the host has no more


@pytest.mark.parametrize("told", ["no-store", "private, No-Cache", "max-age=0, must-revalidate"])
async def test_an_image_that_changes_all_the_time_is_not_kept(host: Host, told: str) -> None:
    host.answers["/"] = response(PNG, "Content-Type: image/png", f"Cache-Control: {told}")
    fetching, _ = fetcher()
    for _ in range(2):
        await fetching.fetch(f"http://pictures.test:{host.port}/", "url")
    assert len(host.heads) == 2


async def test_what_is_kept_has_a_limit(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "KEPT_BYTES", 100)
    headers = ("Content-Type: image/png", "Cache-Control: max-age=60")
    host.answers = {f"/{size}": response(b"x" * size, *headers) for size in (40, 50, 60, 101)}
    fetching, _ = fetcher()

    async def asked(size: int) -> bool:
        before = len(host.heads)
        assert len(await fetching.fetch(f"http://pictures.test:{host.port}/{size}", "url")) == size
        return len(host.heads) > before

    assert [await asked(size) for size in (40, 50, 40, 50)] == [True, True, False, False]
    assert [await asked(size) for size in (60, 40, 60)] == [True, True, False]  # 40 and 50 made room
    assert [await asked(size) for size in (101, 101)] == [True, True]


# --- where nothing is fetched from ----------------------------------------------------------------------------------


@pytest.mark.parametrize("address", NOT_PUBLIC)
async def test_a_name_of_an_address_that_is_not_public(address: str, never_connects: list[object]) -> None:
    fetching, names = fetcher(evil_test=[ip_address(address)])
    assert "not public" in await refused(fetching, "http://evil.test/")
    assert (names.asked, never_connects) == (["evil.test"], [])


async def test_one_address_that_is_not_public_is_enough(never_connects: list[object]) -> None:
    async def resolver(name: str, port: int) -> list[IPAddress]:
        return [PUBLIC, LOOPBACK]

    assert "127.0.0.1" in await refused(ImageFetcher(resolver=resolver), "http://evil.test/")
    assert never_connects == []


async def test_an_address_of_this_machine(never_connects: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_get, "is_own", lambda address: address == PUBLIC)
    assert "not public" in await refused(fetcher(own_test=[PUBLIC])[0], "http://own.test/")
    assert never_connects == []


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1/", "http://[::1]/", "http://[::ffff:127.0.0.1]/", "http://[::ffff:7f00:1]/"),
        *("http://localhost/", "http://LOCALHOST./", "http://127.0.0.1./", "http://169.254.169.254/latest/meta-data/"),
        *(
            "http://0.0.0.0/",
            "http://0/",
            "http://127.1/",
            "http://2130706433/",
            "http://0x7f000001/",
            "http://0x7f.1/",
        ),
        *("http://0177.0.0.1/", "http://017700000001/", "http://134744072/", "http://1.2.3.4.5/", "http://a.0x7f/"),
        *("http://[fe80::1%25eth0]/", "http://[fe80::1%eth0]/", "http://[64:ff9b::7f00:1]/", "http://[::]/"),
        *("http://１２７.０.０.１/", "http://ⓛocalhost/", "http://%6c%6f%63%61%6c/", "http://a..b/", "http://a b/"),
    ],
)
async def test_every_spelling_of_a_forbidden_address(url: str, never_connects: list[object]) -> None:
    await refused(ImageFetcher(), url)
    assert never_connects == []


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://public.test:22/", "port 22"),
        ("http://public.test:8080/", "port 8080"),
        ("http://public.test:99999/", "port 99999"),
        ("http://public.test:0/", "port 0"),
        ("https://me:secret@public.test/", "user's name"),
        ("http://pictures.test\\@public.test/", "user's name"),
        ("ftp://public.test/", "scheme ftp"),
        ("http:///x", "no name of a host"),
        ("http://a.test/\ud800", "no URL"),
        ("http:public.test", "no name of a host"),
        ("http://public.test/" + "x" * 9000, "too long"),
        ("http://public.test/\r\nX: y", "no URL"),
        ("http://[v1.x]/", "no URL"),
        ("http://" + "a" * 64 + ".test/", "no name of a host"),
        ("http://unknown.test/", "no address"),
    ],
)
async def test_urls_that_are_not_followed(url: str, reason: str, never_connects: list[object]) -> None:
    line = await refused(fetcher(public_test=[PUBLIC])[0], url)
    assert reason in line
    assert "secret" not in line
    assert never_connects == []


@pytest.mark.parametrize(
    "location",
    [
        *("http://internal.test/", "http://127.0.0.1:{port}/", "//127.0.0.1:{port}/", "http://[::1]:{port}/"),
        *(
            "file:///etc/hosts",
            "data:image/png;base64,AAAA",
            "http://me:pw@pictures.test:{port}/",
            "http://2130706433/",
        ),
        *("http://[", "gopher://pictures.test/", "http://169.254.169.254/"),
    ],
)
async def test_each_redirect_is_checked(host: Host, location: str) -> None:
    host.answers["/away"] = redirect(location.format(port=host.port))
    fetching, names = fetcher(internal_test=[ip_address("192.168.1.1")])
    names.answers |= {"127.0.0.1": [LOOPBACK], "::1": [LOOPBACK], "169.254.169.254": [ip_address("169.254.169.254")]}
    await refused(fetching, f"http://pictures.test:{host.port}/away")
    assert len(host.heads) == 1


async def test_hosts_can_be_allowed_by_address(host: Host) -> None:
    url = f"http://nas.test:{host.port}/"
    assert await fetcher(["127.0.0.1"], nas_test=[LOOPBACK])[0].fetch(url, "url") == PNG
    assert "127.0.0.1" in await refused(fetcher(["::1", "other.test"], nas_test=[LOOPBACK])[0], url)


# --- what a host may send -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (response(status="404 Not Found"), "404"),
        (response(status="206 Partial Content"), "206"),
        (response(PNG, "Content-Type: text/html"), "text/html"),
        (response(PNG, "X-None: x"), "no image"),
        (response(PNG, "Content-Type: image/png", "Content-Encoding: gzip"), "compressed"),
        (response(PNG + b"x" * 1000), "more than"),
        (response().replace(b"Content-Length: ", b"Content-Length: 9"), "Error"),
        (response().replace(b"Content-Length: ", b"Content-Length: x"), "Error"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n" + b"x" * 2000, "more than"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nTransfer-Encoding: chunked\r\n\r\n"
            + b"200\r\n"
            + b"x" * 600,
            "Error",
        ),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000, "Error"),
        (b"not HTTP\r\n\r\n", "Error"),
        (b"", "Error"),
        (response(b"", status="302 Found"), "more than 3 redirects"),
    ],
)
async def test_answers_that_are_refused(
    host: Host, answer: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_get, "MAX_IMAGE_BYTES", 1000)
    host.answers["/"] = answer
    assert reason in await refused(fetcher()[0], f"http://pictures.test:{host.port}/")


async def test_a_host_that_does_not_answer(host: Host) -> None:
    assert "ConnectError" in await refused(fetcher()[0], "http://pictures.test:1/")


@pytest.mark.parametrize("beginning", [b"", b"HTTP/1.1 200 OK\r\n", response()[:-5]])
async def test_a_host_that_takes_too_long(beginning: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "FETCH_SECONDS", 0.1)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(beginning)
        await reader.read()  # until the other side gives up
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await refused(fetcher()[0], f"http://pictures.test:{port}/")


# --- a request's images ---------------------------------------------------------------------------------------------


async def test_images_of_a_request_come_in_order(host: Host) -> None:
    host.answers["/2"] = response(b"two")
    sources = [DATA_URL, f"http://pictures.test:{host.port}/2", DATA_URL]
    assert await fetcher()[0].load([ImageSource(url, "url") for url in sources]) == [PNG, b"two", PNG]


@pytest.mark.parametrize(("limit", "value", "said"), [("MAX_IMAGES", 1, "at most 1"), ("MAX_REQUEST_BYTES", 100, "MB")])
async def test_limits_of_a_request(limit: str, value: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, limit, value)
    with pytest.raises(InvalidRequest, match=said) as caught:
        await ImageFetcher().load([ImageSource(DATA_URL, "first"), ImageSource(DATA_URL, "second")])
    assert caught.value.param == "second"


async def test_nothing_is_fetched_where_that_is_turned_off(host: Host) -> None:
    fetching = ImageFetcher.of(NetworkConfig(disable_fetch_requests=True, fetch_allowed_hosts=["127.0.0.1"]))
    with pytest.raises(Unsupported, match=r"network\.disable_fetch_requests"):
        await fetching.load([ImageSource(f"http://127.0.0.1:{host.port}/", "url")])
    assert await fetching.load([ImageSource(DATA_URL, "url")]) == [PNG]
    assert host.heads == []


async def test_settings_say_which_hosts_are_allowed(host: Host) -> None:
    fetching = ImageFetcher.of(NetworkConfig(fetch_allowed_hosts=["127.0.0.1"]))
    assert await fetching.load([ImageSource(f"http://127.0.0.1:{host.port}/", "url")]) == [PNG]


async def test_files_of_the_folder_are_read_but_not_by_way_of_a_host(host: Host, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(PNG)
    fetching = ImageFetcher.of(NetworkConfig(image_dir=str(tmp_path)))
    assert await fetching.load([ImageSource("file://cat.png", "url")]) == [PNG]
    with pytest.raises(Unsupported, match="image_dir"):
        await ImageFetcher.of(NetworkConfig()).load([ImageSource("file://cat.png", "url")])
    host.answers["/"] = redirect((tmp_path / "cat.png").as_uri())
    allowed = ImageFetcher.of(NetworkConfig(image_dir=str(tmp_path), fetch_allowed_hosts=["127.0.0.1"]))
    with pytest.raises(InvalidRequest, match="could not be fetched"):
        await allowed.load([ImageSource(f"http://127.0.0.1:{host.port}/", "url")])
