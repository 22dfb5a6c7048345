"""Images of conversations: from the URLs in messages to what an engine gets.

A chat template knows texts. So each image has a name that stands for it there, and its place in the prompt is where the
template has put the name. The name says what is in the image and nothing else: the same image makes the same prompt,
and can be told from another, in every turn of a conversation. A client cannot know the names, which are made from a
secret of this process, so no text becomes an image by chance or intent.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType
from typing import Final

from backends.messages import ModelInfo
from common.errors import InvalidRequest, Unsupported
from common.fetch import ImageFetcher, ImageSource
from common.generation import ImageInput, TextSpan
from common.image_urls import MAX_REQUEST_BYTES
from endpoints.OAI.types.message import ChatMessage

_DIGEST_BYTES: Final = 16
MAX_SENT_BYTES: Final = 4 * MAX_REQUEST_BYTES
# Letters and digits alone, which nothing that a template does to a text takes for more than they are.
_PREFIX: Final = f"image{secrets.token_hex(8)}"
_NAME: Final = re.compile(f"{_PREFIX}([0-9a-f]{{{2 * _DIGEST_BYTES}}})")


@dataclass(frozen=True)
class RequestImage:
    """
    Attributes:
        data: as it came, encoded.
        param: path of the first URL of the image in the request.
    """

    digest: bytes
    data: bytes
    param: str

    @property
    def name(self) -> str:
        return _PREFIX + self.digest.hex()


class RequestImages:
    """The images of one request, by their URLs."""

    def __init__(self, images: Mapping[str, RequestImage] = MappingProxyType({})) -> None:
        self._images = images

    def name_of(self, url: str) -> str | None:
        """What stands for an image in a message; None for one that was not loaded."""
        image = self._images.get(url)
        return None if image is None else image.name

    def shown_in(self, prompt: str) -> list[ImageInput]:
        """The images that a prompt shows, in the order in which it does."""
        spans: dict[bytes, list[TextSpan]] = {}
        for match in _NAME.finditer(prompt) if self._images else ():
            spans.setdefault(bytes.fromhex(match[1]), []).append(match.span())
        images = {image.digest: image for image in self._images.values()}
        return [
            ImageInput(spans=places, digest=digest, data=images[digest].data, param=images[digest].param)
            for digest, places in spans.items()
            if digest in images
        ]


NO_IMAGES: Final = RequestImages()


def check_answers(images: Sequence[ImageInput], count: int) -> None:
    """Refuse more answers about images than can be asked for at once: each takes all of them to the engine."""
    size = sum(len(image.data) for image in images)
    if count * size > MAX_SENT_BYTES:
        raise InvalidRequest(
            f"{count} answers about {size / 1024**2:.0f} MB of images are too many at once. Lower n, or send smaller "
            "images.",
            param="n",
        )


async def load_images(
    messages: Sequence[ChatMessage], info: ModelInfo, fetcher: ImageFetcher, path: str = "messages"
) -> RequestImages:
    """The images of a conversation, each URL once.

    Args:
        path: of the messages in the request, for errors.

    Raises:
        InvalidRequest: an image cannot be had.
        Unsupported: the model takes none.
    """
    sources: dict[str, str] = {}
    for url, param in _sources(messages, path, info):
        sources.setdefault(url, param)
    if not sources:
        return NO_IMAGES
    contents = await fetcher.load([ImageSource(url, param) for url, param in sources.items()])
    return RequestImages(
        {
            url: RequestImage(blake2b(data, digest_size=_DIGEST_BYTES).digest(), data, param)
            for (url, param), data in zip(sources.items(), contents, strict=True)
        }
    )


def _sources(messages: Sequence[ChatMessage], path: str, info: ModelInfo) -> Iterator[tuple[str, str]]:
    """URLs of images, and their paths in the request."""
    for index, message in enumerate(messages):
        for number, part in enumerate(message.content or ()):
            if part.is_image:
                place = f"{path}.{index}.content.{number}"
                _check_vision(info, place)
                if part.image_url is None:
                    raise InvalidRequest(f"{place}.image_url is missing.", param=f"{place}.image_url")
                yield part.image_url.url, f"{place}.image_url.url"


def _check_vision(info: ModelInfo, place: str) -> None:
    if info.use_vision:
        return
    if info.has_vision:
        raise Unsupported(
            f"{place} is an image, but the vision tower of {info.name} is not loaded. Set model.vision, and load the "
            "model again.",
            param=place,
        )
    raise Unsupported(f"{place} is an image, but {info.name} has no vision: it takes text only.", param=place)
