"""Images -> what stands for them in a prompt: ids that no vocabulary has, and the embeddings behind these.

The engine looks pages of its cache up by ids. So an image has the same ids as long as the process lives, also when its
embeddings were dropped and are computed anew: a conversation goes on from what is cached, the image included.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Final

from PIL.Image import Image

from backends.exllamav3.engine import FIRST_IMAGE_ID, Config, MMEmbedding, Model, Tokenizer, token_tensor
from backends.exllamav3.prompt_tokens import Insert
from common.errors import InvalidRequest, Unsupported
from common.generation import ImageInput
from common.images import decode_image

COMPONENT: Final = "vision"
# Of an image's shorter edge. Towers refuse what is smaller than one of their patches, which have up to 32 pixels.
SMALLEST_EDGE: Final = 64
LARGEST_RATIO: Final = 200  # of the edges, as Qwen's towers have it
# Images whose ids are known, with embeddings or without. Pages of older ones are long gone.
KNOWN_IMAGES: Final = 10_000


def find_tower(config: Config) -> Model | None:
    """The vision tower of a model, without its weights; None where it has none, or its files leave it out."""
    if COMPONENT not in config.model_classes:
        return None
    tower = Model.from_config(config, component=COMPONENT)
    return tower if any(config.stc.list_tensors(prefix=module.key) for module in tower.modules) else None


class Vision:
    """A vision tower and the images that it has seen.

    Args:
        tower: loaded before the first image comes.
        cache_bytes: for the embeddings of images, in host RAM. Those unused for longest are dropped; what the last
            request has shown stays, however large.
    """

    def __init__(self, tower: Model, tokenizer: Tokenizer, cache_bytes: int) -> None:
        self._tower = tower
        self._tokenizer = tokenizer
        self._cache_bytes = cache_bytes
        self._embeddings: OrderedDict[bytes, MMEmbedding] = OrderedDict()  # by digest, the latest last
        self._first_ids: OrderedDict[bytes, int] = OrderedDict()  # likewise
        self._looking = asyncio.Lock()

    def load(self, arguments: dict[str, Any]) -> Iterator[tuple[int, int]]:
        """Read the weights. Yields modules done, and of how many."""
        steps: Iterator[tuple[int, int]] = self._tower.load_gen(**arguments)
        return steps

    def unload(self) -> None:
        self._embeddings.clear()
        self._tower.unload()

    def clear(self) -> None:
        """Drop all embeddings."""
        self._embeddings.clear()

    async def see(self, images: Sequence[ImageInput]) -> None:
        """Make `embed()` quick for some images.

        They are decoded in a thread, one at a time whoever asks, and other work comes in between. Errors as for
        `embed()`.
        """
        for image in images:
            async with self._looking:
                if image.digest not in self._embeddings:
                    self._encode(image, await asyncio.to_thread(_picture, image))
                self._embeddings.move_to_end(image.digest)
        self._shrink(len(images))

    def embed(self, images: Sequence[ImageInput]) -> list[MMEmbedding]:
        """What a job with these images takes, in their order.

        Raises:
            InvalidRequest: an image cannot be decoded, or is of a shape that the tower does not take.
        """
        for image in images:
            if image.digest not in self._embeddings:
                self._encode(image, _picture(image))
            self._embeddings.move_to_end(image.digest)
        self._shrink(len(images))
        return [self._embeddings[image.digest] for image in images]

    def _encode(self, image: ImageInput, picture: Image) -> None:
        try:
            embedding: MMEmbedding = self._tower.get_image_embeddings(self._tokenizer, picture)
        except (AssertionError, ValueError) as error:  # of how images are cut into patches
            raise InvalidRequest(f"The model cannot see an image of this shape: {error}.", param=image.param) from error
        _number(embedding, self._first_ids.setdefault(image.digest, embedding.first_index))
        self._first_ids.move_to_end(image.digest)
        while len(self._first_ids) > KNOWN_IMAGES:
            self._first_ids.popitem(last=False)
        self._embeddings[image.digest] = embedding

    def _shrink(self, kept: int) -> None:
        """Drop what is too much, but not the `kept` latest images."""
        held = sum(map(_size, self._embeddings.values()))
        while held > self._cache_bytes and len(self._embeddings) > kept:
            _, dropped = self._embeddings.popitem(last=False)
            held -= _size(dropped)


def embedded(vision: Vision | None, images: Sequence[ImageInput]) -> list[MMEmbedding]:
    """What a model makes of images. Raises `Unsupported` for any where it has no tower; else as `Vision.embed()`."""
    if not images:
        return []
    if vision is None:
        raise Unsupported("The model takes no images.", param=images[0].param)
    return vision.embed(images)


def inserts_of(images: Sequence[ImageInput], embeddings: Sequence[MMEmbedding]) -> list[Insert]:
    """Where the ids of images go in a prompt text."""
    pairs = zip(images, embeddings, strict=True)
    return [Insert(span, embedding.token_list_at) for image, embedding in pairs for span in image.spans]


def _picture(image: ImageInput) -> Image:
    """The picture in a shape that every tower takes."""
    picture = decode_image(image.data, image.param)
    width, height = picture.size
    short, long = sorted(picture.size)
    if long > LARGEST_RATIO * short:
        raise InvalidRequest(
            f"The image has {width} x {height} pixels; one edge may be {LARGEST_RATIO} times the other at most.",
            param=image.param,
        )
    factor = SMALLEST_EDGE / short
    return picture.resize((round(width * factor), round(height * factor))) if factor > 1 else picture


def _number(embedding: MMEmbedding, first: int) -> None:
    """Give an embedding the ids from `first` on."""
    shift = first - embedding.first_index
    embedding.first_index += shift
    embedding.last_index += shift
    embedding.token_list = [token + shift if token >= FIRST_IMAGE_ID else token for token in embedding.token_list]
    embedding.token_string = token_tensor(embedding.token_list)


def _size(embedding: MMEmbedding) -> int:
    """Bytes of an embedding."""
    return sum(tensor.nbytes for tensor in (embedding.embeddings, *(embedding.deepstack_embeddings or ())))
