"""The images that requests name by their URLs."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple

from loguru import logger

from common.addresses import Resolver, resolve
from common.config_models import NetworkConfig
from common.errors import InvalidRequest, Unsupported
from common.image_files import read_image_file
from common.image_urls import MAX_IMAGE_BYTES, MAX_REQUEST_BYTES, decode_data_url, scheme_of
from common.limits import MAX_IMAGES

FETCH_SECONDS: Final = 20.0  # look-up, redirects and body together
# What was fetched is kept, as a chat sends the URLs of all its images in each turn.
KEPT_BYTES: Final = 64 * 1024**2
KEPT_SECONDS: Final = 300.0

_REFUSED: Final = (
    "The image could not be fetched from its URL. It has to be an image of at most "
    f"{MAX_IMAGE_BYTES // 1024**2} MB that a public host sends within {FETCH_SECONDS:.0f} seconds; the server's log "
    "says more. An image can also be sent in the request itself, as a data: URL."
)


class ImageSource(NamedTuple):
    """
    Attributes:
        param: path of the URL in the request, for errors.
    """

    url: str
    param: str


class _Kept:
    """Images by their URLs, each for `KEPT_SECONDS` from when it came; the oldest go first where there is no room."""

    def __init__(self) -> None:
        self._images: OrderedDict[str, tuple[float, bytes]] = OrderedDict()  # with the time at which it expires
        self._bytes = 0

    def get(self, url: str) -> bytes | None:
        self._drop_expired()
        _, data = self._images.get(url, (0.0, None))
        return data

    def put(self, url: str, data: bytes) -> None:
        self._drop(url)
        self._images[url] = (monotonic() + KEPT_SECONDS, data)
        self._bytes += len(data)
        while self._bytes > KEPT_BYTES:
            self._drop(next(iter(self._images)))

    def _drop_expired(self) -> None:
        now = monotonic()
        for url in [url for url, (expires, _) in self._images.items() if expires <= now]:
            self._drop(url)

    def _drop(self, url: str) -> None:
        if (dropped := self._images.pop(url, None)) is not None:
            self._bytes -= len(dropped[1])


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
        self._allowed_hosts = allowed_hosts
        self._folder = folder
        self._resolve = resolver
        self._kept = _Kept()

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
        """What a host sends for an http(s) URL and declares to be an image, or has sent some minutes ago.

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
        if (kept := self._kept.get(url)) is not None:
            return kept
        # Imported here: httpx takes 4 MB, with the command line that it brings along, and few servers fetch images.
        from common.guarded_get import GuardedGet, Refusal

        guarded = GuardedGet(self._allowed_hosts, self._resolve)
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                data, lasts = await guarded.image(url)
            if lasts:
                self._kept.put(url, data)
            return data
        except Refusal as refusal:
            reason = str(refusal)
        except TimeoutError:
            reason = f"it took longer than {FETCH_SECONDS:.0f} seconds"
        logger.info("An image of a request was not fetched: {}", reason)
        raise InvalidRequest(_REFUSED, param=param)
