"""Images of requests: limits, URLs, and what their bytes hold."""

from __future__ import annotations

import base64
import binascii
import io
import re
from typing import Final
from urllib.parse import unquote_to_bytes, urlsplit

from PIL import Image, ImageOps

from common.errors import InvalidRequest

MAX_IMAGE_BYTES: Final = 20 * 1024**2
MAX_REQUEST_BYTES: Final = 64 * 1024**2  # of all images of one request
MAX_PIXELS: Final = 64_000_000
# Passes of a progressive JPEG. Encoders make about ten; thousands fit into a small file, each as slow as the first.
MAX_SCANS: Final = 100
# By which the decoders take a file: a PNG of 20 MB in parts of 8 KB needs 8,000. Millions of parts would take minutes.
MAX_READS: Final = 100_000
_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_WHITESPACE: Final = re.compile(rb"\s+")
_URL_SAFE: Final = bytes.maketrans(b"-_", b"+/")
_JPEG: Final = b"\xff\xd8"  # also of pictures that Pillow calls MPO, several JPEGs in a file
_START_OF_SCAN: Final = b"\xff\xda"  # of no other meaning in a JPEG: a scan's own 0xff is followed by a zero


def scheme_of(url: str, param: str) -> str:
    """data, http, https or file. Raises InvalidRequest for anything else."""
    try:
        scheme = urlsplit(url.strip()).scheme
    except ValueError:  # such as a bracket that belongs to no IPv6 address
        scheme = ""
    if scheme in ("data", "http", "https", "file"):
        return scheme
    raise InvalidRequest(
        "An image needs a URL, such as data:image/png;base64,..."
        + (f" The scheme {scheme}: is not allowed." if scheme else ""),
        param=param,
    )


def decode_data_url(url: str, param: str) -> bytes:
    """What a data: URL holds: RFC 2397, with whatever line breaks and parameters. Raises InvalidRequest."""
    header, comma, data = url.strip().partition(",")
    if not comma:
        raise InvalidRequest("The data: URL has no comma, after which its data would follow.", param=param)
    content = unquote_to_bytes(data.encode("utf-8", "replace"))
    if header.rpartition(";")[2].strip().lower() != "base64":
        return content
    # Mail and shells break lines; some encoders use the alphabet for URLs or leave the padding out.
    packed = _WHITESPACE.sub(b"", content).translate(_URL_SAFE).rstrip(b"=")
    try:
        return base64.b64decode(packed + b"=" * (-len(packed) % 4), validate=True)
    except binascii.Error as error:
        raise InvalidRequest(f"The data: URL is not valid base64: {error}.", param=param) from error


class _Reader(io.BytesIO):
    """What a decoder reads, in a bounded number of steps, and of a JPEG with a bounded number of scans.

    What is not read does not count: phones put a film behind the picture.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._is_jpeg = data.startswith(_JPEG)
        self._reads = self._scans = 0

    def read(self, size: int | None = -1, /) -> bytes:
        part = super().read(size)
        self._reads += 1
        if self._reads > MAX_READS:
            raise ValueError("too many parts")
        if self._is_jpeg:
            self._scans += part.count(_START_OF_SCAN)
            if self._scans > MAX_SCANS:
                raise ValueError("too many scans")
        return part


def decode_image(data: bytes, param: str) -> Image.Image:
    """The picture in some bytes, upright and in RGB; of an animation the first frame.

    What is transparent is seen on white. Of 16 bits a pixel, the upper eight are taken.

    What it takes to decode is bounded by the size that the header promises, which is looked at first.

    Raises:
        InvalidRequest: the picture is too large, or cannot be read.
    """
    if not data:
        raise InvalidRequest("The image is empty.", param=param)
    if len(data) > MAX_IMAGE_BYTES:
        raise InvalidRequest(f"The image is larger than {MAX_IMAGE_BYTES // 1024**2} MB.", param=param)
    try:
        image = Image.open(_Reader(data), formats=_FORMATS)
        if image.width * image.height <= MAX_PIXELS:
            image.load()
            return _rgb(ImageOps.exif_transpose(image))
    except Image.DecompressionBombError as error:  # of Pillow's own limit, which is higher
        raise InvalidRequest(
            f"The image has too many pixels; at most {MAX_PIXELS // 1_000_000} million are read.", param=param
        ) from error
    except Exception as error:
        # The decoders read foreign bytes, and fail on them in many ways; what they say names objects of theirs.
        raise InvalidRequest(
            f"The image cannot be read; it has to be whole, and one of {', '.join(_FORMATS)}.", param=param
        ) from error
    raise InvalidRequest(
        f"The image has {image.width} x {image.height} pixels; at most {MAX_PIXELS // 1_000_000} million are read.",
        param=param,
    )


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        image = image.convert("I").point(lambda value: value / 256).convert("L")
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB")
