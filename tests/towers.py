"""Vision towers of several families: what they see, ours and those of transformers in fp32."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL.Image import Image, Resampling
from torch import Tensor

from backends.exllamav3.engine import FIRST_IMAGE_ID, Config, Model, Tokenizer
from backends.exllamav3.prompt_tokens import PromptEncoder
from backends.exllamav3.vision import COMPONENT
from tests.logits import engine_logits
from tests.models import (
    VOCABULARY,
    MakeModel,
    make_gemma3,
    make_gemma4,
    make_glm4v,
    make_lfm2_vl,
    make_mistral3,
    make_qwen2_5_vl,
    make_qwen3_vl,
    make_vision,
)
from tests.models.vision import IMAGE_ID, IMAGE_MEAN, IMAGE_STD, PATCH, TILE


class Sight(NamedTuple):
    embeddings: Tensor  # of the image, (its tokens, hidden size)
    logits: Tensor  # of a prompt with the image, (1, tokens, vocabulary)


@dataclass(frozen=True)
class Tower:
    make: MakeModel
    size: tuple[int, int]  # of an image that need not be resized, in pixels
    inputs: Callable[[Image], dict[str, Tensor]]  # of transformers
    multimodal_rope: bool = False


def pixels(image: Image) -> Tensor:
    """(3, height, width), normalised as the models' files say."""
    mean, deviation = torch.tensor(IMAGE_MEAN), torch.tensor(IMAGE_STD)
    return ((torch.tensor(np.array(image)) / 255 - mean) / deviation).permute(2, 0, 1)


def whole(image: Image) -> dict[str, Tensor]:
    return {"pixel_values": pixels(image).unsqueeze(0), "image_sizes": torch.tensor([[image.height, image.width]])}


def in_patches(image: Image) -> dict[str, Tensor]:
    """Each row by row, its colours innermost."""
    patches = pixels(image).unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).permute(1, 2, 3, 4, 0)
    rows, columns = patches.shape[:2]
    return {
        "pixel_values": patches.reshape(1, rows * columns, -1),
        "spatial_shapes": torch.tensor([[rows, columns]]),
        "pixel_attention_mask": torch.ones((1, rows * columns), dtype=torch.long),
    }


def in_tiles(image: Image) -> dict[str, Tensor]:
    """Squares row by row, then the whole image as large as one of them; each in patches."""
    width, height = image.size
    corners = itertools.product(range(0, height, TILE), range(0, width, TILE))
    tiles = [image.crop((left, top, left + TILE, top + TILE)) for top, left in corners]
    parts = [in_patches(part) for part in (*tiles, image.resize((TILE, TILE), Resampling.BICUBIC))]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def in_places(image: Image) -> dict[str, Tensor]:
    """In patches, each with its column and its row."""
    patches = in_patches(image)
    rows, columns = map(torch.arange, patches["spatial_shapes"][0].tolist())
    places = torch.cartesian_prod(rows, columns).flip(-1)
    return {"pixel_values": patches["pixel_values"], "image_position_ids": places.unsqueeze(0)}


def in_blocks(image: Image) -> dict[str, Tensor]:
    """The four patches that become a token one after the other, each twice, as two moments of a film."""
    patches = pixels(image).unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
    _, rows, columns, *_ = patches.shape
    blocks = patches.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).permute(1, 3, 2, 4, 0, 5, 6)
    twice = blocks.unsqueeze(5).expand(*[-1] * 5, 2, -1, -1)
    return {
        "pixel_values": twice.reshape(rows * columns, -1),
        "image_grid_thw": torch.tensor([[1, rows, columns]]),
    }


TOWERS = {
    # transformers lets the tokens of an image see each other in Gemma if it is told where they are. The engine does not
    # in Gemma 3, and in Gemma 4 only with a cache.
    "gemma3": Tower(make_gemma3, (128, 128), whole),
    "gemma4": Tower(make_gemma4, (240, 144), in_places),
    "lfm2_vl": Tower(make_lfm2_vl, (128, 96), in_patches),
    "lfm2_vl_tiles": Tower(make_lfm2_vl, (2 * TILE, 2 * TILE), in_tiles),
    "mistral3": Tower(make_mistral3, (128, 64), whole),
    "glm4v": Tower(make_glm4v, (128, 96), in_blocks, multimodal_rope=True),
    "qwen2_5_vl": Tower(make_qwen2_5_vl, (160, 96), in_blocks, multimodal_rope=True),
    "qwen3_vl": Tower(make_qwen3_vl, (128, 96), in_blocks, multimodal_rope=True),
    "vision": Tower(make_vision, (128, 96), in_blocks, multimodal_rope=True),
}


def engine_sight(directory: Path, image: Image, before: Tensor, after: Tensor) -> tuple[Tensor, Sight]:
    """The ids of a prompt, (1, tokens), that shows an image between two texts; and what is seen of it."""
    config = Config.from_directory(str(directory))
    tower, tokenizer = Model.from_config(config, component=COMPONENT), Tokenizer.from_config(config)
    PromptEncoder(tokenizer)  # teaches it the control tokens, those around an image among them
    tower.load(progressbar=False)
    with torch.inference_mode():
        embedding = tower.get_image_embeddings(tokenizer, image)
    tower.unload()
    ids = torch.cat((before, embedding.token_string, after), dim=1)
    return ids, Sight(embedding.embeddings.float(), engine_logits(directory, ids, images=[embedding]))


def reference_sight(directory: Path, tower: Tower, image: Image, ids: Tensor, **more: Any) -> Sight:
    """Of transformers in fp32, with the ids of a prompt, (1, tokens), that the engine takes.

    Args:
        more: that its model takes.
    """
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    inputs = tower.inputs(image)
    ids = ids.masked_fill(ids >= FIRST_IMAGE_ID, IMAGE_ID)
    kinds = {"mm_token_type_ids": (ids == IMAGE_ID).int()} if tower.multimodal_rope else {}
    with torch.inference_mode():
        seen = model.get_image_features(**inputs).pooler_output
        embeddings = seen if isinstance(seen, Tensor) else torch.cat(seen)
        logits: Tensor = model(input_ids=ids, **inputs, **kinds, **more).logits
    return Sight(embeddings.flatten(0, -2), logits[..., :VOCABULARY])
