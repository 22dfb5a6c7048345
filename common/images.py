"""Images of requests: what their bytes hold.

Only engine processes import this: Pillow takes 2 MB, for which the server has no use.
"""

from __future__ import annotations

import io
from typing import Final

from PIL import Image, ImageOps

from common.errors import InvalidRequest
from common.image_urls import MAX_IMAGE_BYTES

MAX_PIXELS: Final = 64_000_000
# Passes of a progressive JPEG. Encoders make about ten; thousands fit into a small file, each as slow as the first.
MAX_SCANS: Final = 100
# By which the decoders take a file: a PNG of 20 MB in parts of 8 KB needs 8,000. Millions of parts would take minutes.
MAX_READS: Final = 100_000
_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_JPEG: Final = b"\xff\xd8"  # also of pictures that Pillow calls MPO, several JPEGs in a file
_START_OF_SCAN: Final = b"\xff\xda"  # of no other meaning in a JPEG: a scan's own 0xff is followed by a zero


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
