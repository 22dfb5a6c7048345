"""URLs of images in requests: how large what they name may be, and what a data: URL holds."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Final
from urllib.parse import unquote_to_bytes, urlsplit

from common.errors import InvalidRequest

MAX_IMAGE_BYTES: Final = 20 * 1024**2
MAX_REQUEST_BYTES: Final = 64 * 1024**2  # of all images of one request
_WHITESPACE: Final = re.compile(rb"\s+")
_URL_SAFE: Final = bytes.maketrans(b"-_", b"+/")


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
