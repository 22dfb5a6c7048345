"""Pictures that a request brings in by URL, and the guard before anything else that a URL may name."""

from __future__ import annotations

import base64
import binascii
import io
import re
from urllib.parse import unquote_to_bytes, urlsplit

from PIL import Image

from common.errors import InvalidRequest, Unsupported

MAX_PIXELS = 64_000_000
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_WHITESPACE = re.compile(rb"\s+")
_URL_SAFE = bytes.maketrans(b"-_", b"+/")


def read_image(url: str, param: str) -> Image.Image:
    """The picture behind a URL, decoded.

    Args:
        url: a data: URL; RFC 2397, with whatever line breaks and parameters.
        param: path of the URL in the request, for errors.

    Raises:
        InvalidRequest: it is no URL of a picture, or the picture cannot be read.
        Unsupported: the URL names something on another machine.
    """
    return _decode(_load(url.strip(), param), param)


def _load(url: str, param: str) -> bytes:
    try:
        scheme = urlsplit(url).scheme
    except ValueError:  # such as a bracket that belongs to no IPv6 address
        scheme = ""
    if scheme == "data":
        return _decode_data_url(url, param)
    if scheme in ("http", "https"):
        raise Unsupported(
            "Images are not fetched from other machines; send the image itself, as a data: URL.", param=param
        )
    raise InvalidRequest(
        "An image needs a data: URL, such as data:image/png;base64,..."
        + (f" The scheme {scheme}: is not allowed." if scheme else ""),
        param=param,
    )


def _decode_data_url(url: str, param: str) -> bytes:
    header, comma, data = url.partition(",")
    if not comma:
        raise InvalidRequest("The data: URL has no comma, after which its data would follow.", param=param)
    content = unquote_to_bytes(data)
    if header.rpartition(";")[2].strip().lower() != "base64":
        return content
    # Mail and shells break lines; some encoders use the alphabet for URLs or leave the padding out.
    packed = _WHITESPACE.sub(b"", content).translate(_URL_SAFE).rstrip(b"=")
    try:
        return base64.b64decode(packed + b"=" * (-len(packed) % 4), validate=True)
    except binascii.Error as error:
        raise InvalidRequest(f"The data: URL is not valid base64: {error}.", param=param) from error


def _decode(data: bytes, param: str) -> Image.Image:
    if not data:
        raise InvalidRequest("The image is empty.", param=param)
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
        if image.width * image.height <= MAX_PIXELS:
            image.load()
            return image
    except Exception as error:
        # The decoders read foreign bytes, and fail on them in many ways; what they say names objects of theirs.
        raise InvalidRequest(
            f"The image cannot be read; it has to be whole, and one of {', '.join(_FORMATS)}.", param=param
        ) from error
    raise InvalidRequest(
        f"The image has {image.width} x {image.height} pixels; at most {MAX_PIXELS // 1_000_000} million are read.",
        param=param,
    )
