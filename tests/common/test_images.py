"""Images in requests: what decodes, and what does not."""

from __future__ import annotations

import base64
import io
import zlib
from urllib.parse import quote_from_bytes

import pytest
from PIL import Image

from common import images
from common.errors import InvalidRequest
from common.image_urls import decode_data_url, scheme_of
from common.images import MAX_SCANS, decode_image


def picture(format: str = "PNG", size: tuple[int, int] = (30, 20)) -> bytes:
    buffer = io.BytesIO()
    Image.radial_gradient("L").resize(size).convert("RGB").save(buffer, format)
    return buffer.getvalue()


def read_image(url: str, param: str) -> Image.Image:
    assert scheme_of(url, param) == "data"
    return decode_image(decode_data_url(url, param), param)


PNG = picture()
PACKED = base64.b64encode(PNG).decode()


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{PACKED}",
        f"  data:image/png;base64,{PACKED}\n",
        f"data:image/png;base64,{PACKED[:76]}\r\n{PACKED[76:]}",
        f"data:image/png;charset=utf-8;base64,{PACKED}",
        f"DATA:image/png;BASE64,{PACKED}",
        f"data:;base64,{PACKED}",
        f"data:image/png;base64,{PACKED.rstrip('=')}",
        f"data:image/png;base64,{PACKED.replace('+', '%2B').replace('/', '%2F').replace('=', '%3D')}",
        f"data:image/png;base64,{base64.urlsafe_b64encode(PNG).decode()}",
        f"data:image/png,{quote_from_bytes(PNG)}",
    ],
)
def test_every_form_of_a_data_url_is_decoded(url: str) -> None:
    assert read_image(url, "url").size == (30, 20)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_formats(format: str) -> None:
    url = f"data:application/octet-stream;base64,{base64.b64encode(picture(format)).decode()}"
    assert read_image(url, "url").size == (30, 20)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "needs a URL"),
        ("cat.png", "needs a URL"),
        ("C:\\cat.png", "c: is not allowed"),
        ("ftp://127.0.0.1/a.png", "ftp: is not allowed"),
        ("javascript:alert(1)", "javascript: is not allowed"),
        ("http://[", "needs a URL"),
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png;base64,%%%", "base64"),
        ("data:image/png;base64,ab!d", "base64"),
        ("data:image/png;base64,abcde", "base64"),
        ("data:image/png,hello", "cannot be read"),
        (f"data:image/png;base64,{base64.b64encode(PNG[:-30]).decode()}", "cannot be read"),
        (f"data:image/png;base64,{base64.b64encode(PNG[:60]).decode()}", "cannot be read"),
        (f"data:image/jpeg;base64,{base64.b64encode(picture('JPEG')[:-200]).decode()}", "cannot be read"),
        (f"data:image/tiff;base64,{base64.b64encode(picture('TIFF')).decode()}", "cannot be read"),
    ],
)
def test_what_is_no_image_is_said_so(url: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        read_image(url, "messages.0.content.1.image_url")
    assert caught.value.status == 400
    assert caught.value.param == "messages.0.content.1.image_url"
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("url", "scheme"),
    [("DATA:,x", "data"), ("HTTPS://example.com/a.png", "https"), (" http://a/", "http"), ("FILE:///a.png", "file")],
)
def test_schemes(url: str, scheme: str) -> None:
    assert scheme_of(url, "url") == scheme


def encoded(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def shades(mode: str, *pixel: float) -> Image.Image:
    return Image.new(mode, (2, 3), pixel)


def palette() -> Image.Image:
    image = Image.new("P", (2, 3), 1)
    image.putpalette([0, 0, 255] * 256)
    return image


@pytest.mark.parametrize(
    ("data", "pixel"),
    [
        (encoded(shades("1", 1)), (255, 255, 255)),
        (encoded(shades("LA", 0, 128)), (127, 127, 127)),
        (encoded(shades("RGBA", 255, 0, 0, 0)), (255, 255, 255)),
        (encoded(shades("CMYK", 0, 255, 255, 0), "JPEG"), (255, 0, 0)),
        (encoded(palette()), (0, 0, 255)),
        (encoded(palette(), transparency=1), (255, 255, 255)),
        (encoded(Image.frombytes("I;16", (2, 3), b"\x40\x80" * 6)), (128, 128, 128)),
    ],
)
def test_every_kind_of_pixel_is_seen_as_colours_on_white(data: bytes, pixel: tuple[int, int, int]) -> None:
    image = decode_image(data, "url")
    assert (image.mode, image.size) == ("RGB", (2, 3))
    seen = image.getpixel((0, 0))
    assert isinstance(seen, tuple)
    assert seen == pytest.approx(pixel, abs=2)


def test_a_photo_is_upright() -> None:
    turned = Image.Exif()
    turned[0x112] = 6  # the orientation of a camera held upright
    assert decode_image(encoded(Image.new("RGB", (30, 20)), "JPEG", exif=turned), "url").size == (20, 30)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("notes", [b"", b"nothing", b"II*\0\xff\xff\xff\xff"])
def test_what_a_camera_notes_of_a_photo_may_be_broken(notes: bytes) -> None:
    photo = encoded(Image.new("RGB", (30, 20)), "JPEG", exif=b"Exif\0\0" + notes)
    assert decode_image(photo, "url").size == (30, 20)


def test_an_image_of_too_many_pixels_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_PIXELS", 599)
    with pytest.raises(InvalidRequest, match="30 x 20"):
        read_image(f"data:;base64,{PACKED}", "url")


def test_a_header_that_promises_too_many_pixels() -> None:
    header = PNG[:16] + (60_000).to_bytes(4, "big") * 2 + PNG[24:]
    with pytest.raises(InvalidRequest):
        read_image(f"data:;base64,{base64.b64encode(header).decode()}", "url")


def test_an_image_of_more_pixels_than_its_decoder_takes_is_said_to_be_too_large() -> None:
    header = b"IHDR" + (60_000).to_bytes(4, "big") * 2 + PNG[24:29]
    with pytest.raises(InvalidRequest, match="64 million"):
        decode_image(PNG[:12] + header + zlib.crc32(header).to_bytes(4, "big") + PNG[33:], "url")


def test_an_image_of_too_many_bytes_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", len(PNG) - 1)
    with pytest.raises(InvalidRequest, match="larger than"):
        read_image(f"data:;base64,{PACKED}", "url")


def test_a_jpeg_of_thousands_of_scans_is_not_decoded() -> None:
    buffer = io.BytesIO()
    Image.radial_gradient("L").save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    assert decode_image(data, "url").size == (256, 256)
    scan = data[data.rindex(b"\xff\xda") : -2]
    assert decode_image(data[:-2] + scan * 10 + data[-2:], "url").size == (256, 256)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        decode_image(data[:-2] + scan * MAX_SCANS + data[-2:], "url")


def test_a_photo_with_a_film_behind_it_is_decoded() -> None:
    film = (bytes(60_000) + b"\xff\xda") * 2 * MAX_SCANS
    assert decode_image(picture("JPEG") + film, "url").size == (30, 20)


def test_nor_is_one_in_a_file_of_several() -> None:
    frames = [Image.radial_gradient("L").convert("RGB")] * 2
    buffer = io.BytesIO()
    frames[0].save(buffer, "MPO", save_all=True, append_images=frames[1:])
    data = buffer.getvalue()
    with Image.open(io.BytesIO(data)) as opened:
        assert opened.format == "MPO"
    assert decode_image(data, "url").size == (256, 256)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        decode_image(data + b"\xff\xda" * MAX_SCANS, "url")


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_is_decoded(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [Image.new("RGB", (8, 8), (value, 0, 0)) for value in range(0, 250, 5)]
    buffer = io.BytesIO()
    frames[0].save(buffer, format, save_all=True, append_images=frames[1:])
    decoded = []
    monkeypatch.setattr(Image.Image, "seek", lambda self, frame: decoded.append(frame))
    assert decode_image(buffer.getvalue(), "url").convert("RGB").getpixel((0, 0)) == (0, 0, 0)
    assert decoded == []


def parts(format: str, part: bytes, times: int) -> bytes:
    """A small picture with something harmless that many times in front of its pixels."""
    buffer = io.BytesIO()
    Image.new("P", (2, 2)).convert("L" if format == "JPEG" else "P").save(buffer, format)
    data = buffer.getvalue()
    place = {"PNG": data.find(b"IDAT") - 4, "JPEG": 2, "GIF": 13 + 3 * 2 ** ((data[10] & 7) + 1)}[format]
    return data[:place] + part * times + data[place:]


@pytest.mark.parametrize(
    ("format", "part"),
    [
        ("PNG", b"\0\0\0\0tEXt" + zlib.crc32(b"tEXt").to_bytes(4, "big")),
        ("JPEG", b"\xff\xfe\0\x02"),
        ("JPEG", b"\xff"),
        ("GIF", b"\x21\x01\x01x\0"),
    ],
)
def test_a_picture_of_ever_so_many_parts_is_given_up(format: str, part: bytes) -> None:
    """The decoders go through them one by one, in Python."""
    assert decode_image(parts(format, part, 500), "image").size == (2, 2)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        decode_image(parts(format, part, 100_000), "image")


def test_half_a_surrogate_pair_in_a_data_url() -> None:
    with pytest.raises(InvalidRequest, match="not valid base64"):
        read_image("data:image/png;base64,\ud800", "image")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_image("data:,\ud800", "image")
