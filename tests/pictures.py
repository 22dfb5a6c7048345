"""Pictures for tests, as the bytes of files and as parts of prompts."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from hashlib import blake2b

from PIL import Image

from common.generation import ImageInput

Colour = tuple[int, int, int]

RED: Colour = (255, 0, 0)
BLUE: Colour = (0, 0, 255)


def picture(colour: Colour = RED, size: tuple[int, int] = (64, 64), format: str = "PNG") -> bytes:
    """A radial gradient from black to a colour."""
    shades = Image.radial_gradient("L").resize(size)
    image = Image.composite(Image.new("RGB", size, colour), Image.new("RGB", size), shades)
    buffer = io.BytesIO()
    image.save(buffer, format)
    return buffer.getvalue()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def shown(prompt: str, pictures: Mapping[str, bytes]) -> list[ImageInput]:
    """Images of a prompt, each in the places where its name stands."""
    return [
        ImageInput(
            spans=[(start, start + len(name)) for start in range(len(prompt)) if prompt.startswith(name, start)],
            digest=blake2b(data, digest_size=16).digest(),
            data=data,
            param=name,
        )
        for name, data in pictures.items()
    ]
