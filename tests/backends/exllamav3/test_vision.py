"""Images on the real engine: what it sees, and what it need not process again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from backends.exllamav3 import engine
from backends.exllamav3.cache_state import _clear_ram, _clear_vram
from backends.exllamav3.engine import FIRST_IMAGE_ID
from backends.exllamav3.model import Draft, ExllamaV3Container
from backends.exllamav3.vision import LARGEST_RATIO, Vision, find_tower
from common.config_models import DraftModelConfig, MemoryConfig
from common.errors import ContextLengthExceeded, InvalidRequest, Unsupported
from common.generation import GenerationRequest
from common.images import decode_image
from common.sampling import SamplingParameters
from tests.conftest import MakeOnce
from tests.containers import GREEDY, Answer, answered, loaded
from tests.models import VOCABULARY
from tests.models.vision import GEMMA4_WINDOW
from tests.pictures import BLUE, RED, picture, shown
from tests.scripted import load_settings
from tests.towers import TOWERS, Tower, reference_sight

FILLER = "Ada carried the lantern near the harbour, slowly. "
LARGE = (256, 256)  # 64 tokens and two around them
START, PAD, END = 5, 6, 7


@pytest.fixture(scope="module")
async def seeing(tiny_vision: Path) -> AsyncIterator[ExllamaV3Container]:
    async with loaded(tiny_vision, vision=True, chunk_size=256) as container:
        yield container


async def asked(container: ExllamaV3Container, prompt: str, pictures: dict[str, bytes], **fields: Any) -> Answer:
    images = shown(prompt, pictures)
    await container.see(images)
    return await answered(container, prompt, images=images, logprobs=0, **fields)


def encoded(container: ExllamaV3Container, prompt: str, pictures: dict[str, bytes], *, bos: bool = False) -> list[int]:
    return container.encode(prompt, add_bos=bos, encode_special_tokens=True, images=shown(prompt, pictures))


def image_ids(ids: list[int]) -> list[int]:
    return [token for token in ids if token >= FIRST_IMAGE_ID]


def logprobs(answer: Answer) -> list[float]:
    return [entry.logprob for entry in answer.logprobs]


@pytest.mark.anyio
async def test_what_a_model_says_of_images_is_what_transformers_has_it_say(
    seeing: ExllamaV3Container, tiny_vision: Path
) -> None:
    """Two images, the first across the end of a prefill chunk; prompt and answer."""
    pictures = {"ONE": picture(RED, LARGE), "TWO": picture(BLUE, (160, 96))}
    prompt = FILLER * 20 + "ONE and TWO: " + FILLER
    answer = await asked(seeing, prompt, pictures)
    ids = encoded(seeing, prompt, pictures)
    assert ids.index(START) < 256 < ids.index(END)
    logits = reference_logits(tiny_vision, [*ids, *answer.token_ids], [*pictures.values()])
    predicted = logits[len(ids) - 1 : -1].log_softmax(-1)
    expected = [row[token].item() for row, token in zip(predicted, answer.token_ids, strict=True)]
    assert answer.token_ids == predicted.argmax(-1).tolist()
    assert logprobs(answer) == pytest.approx(expected, abs=0.02)


def reference_logits(directory: Path, ids: list[int], pictures: list[bytes]) -> torch.Tensor:
    """Of transformers in fp32."""
    from transformers import AutoImageProcessor
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration

    model = Qwen3_5ForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    processor = AutoImageProcessor.from_pretrained(directory)
    images = processor(images=[decode_image(data, "") for data in pictures], return_tensors="pt")
    tokens = torch.tensor([[PAD if token >= FIRST_IMAGE_ID else token for token in ids]])
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=tokens, mm_token_type_ids=(tokens == PAD).int(), **images).logits
    return logits[0, :, :VOCABULARY]


@pytest.mark.anyio
async def test_an_image_is_what_the_answer_depends_on(seeing: ExllamaV3Container) -> None:
    red, blue = picture(RED, LARGE), picture(BLUE, LARGE)
    one = await asked(seeing, "THIS is", {"THIS": red})
    other = await asked(seeing, "THIS is", {"THIS": blue})
    assert one.finish.usage.prompt_tokens == other.finish.usage.prompt_tokens
    assert logprobs(one)[0] != pytest.approx(logprobs(other)[0], abs=0.01)
    both = await asked(seeing, "ONE TWO", {"ONE": red, "TWO": blue})
    swapped = await asked(seeing, "ONE TWO", {"ONE": blue, "TWO": red})
    assert logprobs(both)[0] != pytest.approx(logprobs(swapped)[0], abs=0.01)


@pytest.mark.anyio
async def test_an_image_that_comes_again_is_cached_also_when_its_embedding_is_gone(
    seeing: ExllamaV3Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert seeing.vision is not None
    pictures = {"THIS": picture((9, 99, 9), LARGE)}
    turn = FILLER * 3 + "THIS. " + FILLER * 20
    first = await asked(seeing, turn, pictures)
    ids = image_ids(encoded(seeing, turn, pictures))
    monkeypatch.setattr(seeing.vision, "_cache_bytes", 0)
    await asked(seeing, "OTHER", {"OTHER": picture()})
    assert len(seeing.vision._embeddings) == 1
    second = await asked(seeing, turn + first.text + FILLER * 8, pictures)
    assert first.finish.usage.cached_tokens == 0
    assert second.finish.usage.cached_tokens >= first.finish.usage.prompt_tokens - 256
    assert image_ids(encoded(seeing, turn, pictures)) == ids

    request = GenerationRequest(prompt=turn, sampling=GREEDY, images=shown(turn, pictures))
    found = seeing.explain(request)
    assert found.prompt_tokens == first.finish.usage.prompt_tokens
    assert found.resumed_tokens == found.matched_tokens == 256
    other = msgspec.structs.replace(request, images=shown(turn, {"THIS": picture(BLUE, LARGE)}))
    difference = seeing.explain(other).difference
    assert difference is not None
    assert difference.position == len(encoded(seeing, FILLER * 3, {})) + 1
    assert difference.before.endswith("<|vision_start|>")
    assert difference.cached.startswith("[image]<|vision_end|>.") or difference.cached == "[image]"


@pytest.mark.anyio
async def test_on_disk_an_image_of_an_earlier_process_is_not_taken_for_one_of_its_ids(
    tiny_vision: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = MemoryConfig(sysmem_kv_cache=16, disk_cache_dir=str(tmp_path), disk_cache_checkpoint_interval=0)
    every_page: dict[str, Any] = {"recurrent_checkpoint_interval": 256, "recurrent_checkpoint_interval_pp": 256}
    turn = FILLER * 3 + "THIS. " + FILLER * 40
    async with loaded(tiny_vision, memory=memory, vision=True, chunk_size=256, **every_page) as container:
        assert container.generator is not None
        assert container.vision is not None
        generator = container.generator.generator
        await asked(container, turn, {"THIS": picture(RED, LARGE)})
        for page in generator.pagetable.all_pages:
            page.persistable = True  # as the engine has it of those that it took for an answer and gave back unwritten
        await container.flush()
        blue = picture(BLUE, LARGE)
        (first_id,) = container.vision._first_ids.values()
        container.vision._first_ids[shown("THIS", {"THIS": blue})[0].digest] = first_id
        found = []
        for process in (b"another", engine._PROCESS):
            monkeypatch.setattr(engine, "_PROCESS", process)
            _clear_vram(generator)
            _clear_ram(generator.cpu_page_cache)
            answer = await asked(container, turn, {"THIS": blue}, max_tokens=1)
            found.append(answer.finish.usage.disk_tokens)
    assert found == [0, 512]  # the second is what the first is kept from


@pytest.mark.anyio
async def test_images_that_are_unused_for_longest_are_dropped_first(
    seeing: ExllamaV3Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert seeing.vision is not None
    seeing.vision.clear()
    one, two, three = (shown("X", {"X": picture((value, 0, 0))})[0] for value in (10, 20, 30))
    size = seeing.vision.embed([one])[0].embeddings.nbytes
    monkeypatch.setattr(seeing.vision, "_cache_bytes", 2 * size)
    for images in ([two], [one], [three]):
        await seeing.see(images)
    assert [*seeing.vision._embeddings] == [one.digest, three.digest]
    assert len(seeing.vision.embed([one, two, three])) == 3
    assert [*seeing.vision._embeddings] == [one.digest, two.digest, three.digest]  # of one request
    seeing.vision.embed([two])
    assert [*seeing.vision._embeddings] == [three.digest, two.digest]


@pytest.mark.anyio
async def test_several_requests_look_at_an_image_once(
    seeing: ExllamaV3Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert seeing.vision is not None
    encoded_images = []
    encode = seeing.vision._encode

    def count(*arguments: Any) -> None:
        encoded_images.append(arguments)
        encode(*arguments)

    monkeypatch.setattr(seeing.vision, "_encode", count)
    images = shown("X", {"X": picture((1, 2, 3))})
    await asyncio.gather(*(seeing.see(images) for _ in range(3)))
    assert len(encoded_images) == 1


def test_an_image_stands_in_every_place_of_its_name(seeing: ExllamaV3Container) -> None:
    pictures = {"ONE": picture(), "TWO": picture(BLUE)}
    ids = encoded(seeing, "ONEa ONE TWO<|im_end|>ONE", pictures, bos=True)
    places = [index for index, token in enumerate(ids) if token == START]
    one, again, two, last = (ids[place : place + 6] for place in places)
    assert one == again == last
    assert image_ids(one) == list(range(one[1], one[1] + 4))
    assert (one[0], one[-1]) == (START, END)
    assert not {*image_ids(one)} & {*image_ids(two)}
    assert len(ids) == 1 + 4 * 6 + len(encoded(seeing, "a ", {})) + len(encoded(seeing, " ", {})) + 1


@pytest.mark.anyio
async def test_penalties_and_drafts_do_not_meet_the_ids_of_images(tiny_vision: Path) -> None:
    sampling = SamplingParameters(
        repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5, dry_multiplier=1.0, dry_allowed_length=1
    )
    drafting = DraftModelConfig.model_validate({"draft_mode": "ngram"})
    async with loaded(tiny_vision, vision=True, draft_model=drafting) as container:
        pictures, length = {"ONE": picture(BLUE, LARGE)}, {"min_tokens": 40, "max_tokens": 40}
        answer = await asked(container, "ONE ONE", pictures, sampling=sampling, token_healing=True, **length)
    assert len(answer.token_ids) == 40
    assert not image_ids(answer.token_ids)


@pytest.mark.parametrize("size", [(1, 1), (5, 40), (30, 64), (64, 700), (2000, 1500)])
def test_pictures_of_many_sizes(seeing: ExllamaV3Container, size: tuple[int, int]) -> None:
    ids = image_ids(encoded(seeing, "X", {"X": picture(RED, size)}))
    assert 4 <= len(ids) <= 64


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (picture()[:-30], "cannot be read"),
        (picture(RED, (1, LARGEST_RATIO + 1)), "200 times"),
        (picture(RED, (64 * LARGEST_RATIO + 64, 64)), "200 times"),
    ],
)
async def test_what_cannot_be_seen_is_said_so(seeing: ExllamaV3Container, data: bytes, message: str) -> None:
    images = shown("X", {"X": data})
    for see in (lambda: seeing.see(images), lambda: answered(seeing, "X", images=images)):
        with pytest.raises(InvalidRequest, match=message) as caught:
            await see()
        assert caught.value.param == "X"
    with pytest.raises(InvalidRequest, match=message):
        encoded(seeing, "X", {"X": data})
    assert (await asked(seeing, "X", {"X": picture()})).token_ids


@pytest.mark.anyio
async def test_images_count_for_the_length_of_the_context(
    seeing: ExllamaV3Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeing, "dimensions", replace(seeing.dimensions, max_seq_len=256))
    prompt = "ONE TWO THREE FOUR"
    pictures = {name: picture((index, 0, 0), LARGE) for index, name in enumerate(prompt.split())}
    assert (await asked(seeing, "ONE TWO THREE", pictures)).finish.usage.prompt_tokens > 3 * 66
    with pytest.raises(ContextLengthExceeded, match="267 tokens"):
        await asked(seeing, prompt, pictures)


# --- towers of other families -----------------------------------------------------------------------------------------


SLOW_TOWERS = ("lfm2_vl", "mistral3", "glm4v", "qwen3_vl")


@pytest.mark.anyio
@pytest.mark.parametrize(
    "family",
    [
        *("gemma3", "lfm2_vl_tiles", "qwen2_5_vl"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_TOWERS),
    ],
)
async def test_what_a_tower_sees_is_what_transformers_sees(family: str, make_once: MakeOnce) -> None:
    await compare_with_transformers(TOWERS[family], make_once, "THIS: " + FILLER)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("text", "across_chunks"), [(FILLER * 2, False), (FILLER * 23, True)], ids=["in_a_chunk", "across_chunks"]
)
async def test_tokens_of_an_image_see_each_other_in_gemma_4(
    text: str, across_chunks: bool, make_once: MakeOnce
) -> None:
    """Also where a prefill chunk would end between them.

    transformers lets them do so in layers with windows only, the engine in all: `_prepare_noncausal_mm_spans` in its
    `architecture/gemma4.py` does not tell layers apart. So transformers is given masks as the engine has them.
    """
    ids = await compare_with_transformers(TOWERS["gemma4"], make_once, text + "THIS", gemma4_masks)
    assert (ids.index(START) < 256 < ids.index(END)) == across_chunks


def gemma4_masks(ids: Tensor) -> dict[str, Any]:
    """Of tokens (rows), those they see; `ids`, (1, tokens), with one image."""
    places, image = torch.arange(ids.shape[1]), ids[0] >= FIRST_IMAGE_ID
    distance = places[:, None] - places
    seen = (distance >= 0) | (image[:, None] & image)
    masks = {"full_attention": seen, "sliding_attention": seen & (distance < GEMMA4_WINDOW)}
    return {"attention_mask": {kind: mask[None, None] for kind, mask in masks.items()}}


async def compare_with_transformers(
    tower: Tower, make_once: MakeOnce, prompt: str, more: Callable[[Tensor], dict[str, Any]] = lambda ids: {}
) -> list[int]:
    """What the engine makes of an image, and what it says of a prompt that shows it in place of THIS.

    Args:
        more: what transformers' model takes beside the ids of the prompt and its answer, which it is given.

    Returns:
        The ids of the prompt.
    """
    directory = make_once(tower.make.__name__, tower.make)
    data = picture((250, 120, 60), tower.size)
    pictures = {"THIS": data}
    async with loaded(directory, vision=True, chunk_size=256) as container:
        answer = await asked(container, prompt, pictures)
        ids = encoded(container, prompt, pictures)
        (embedding,) = vision_of(container).embed(shown(prompt, pictures))

    whole = torch.tensor([[*ids, *answer.token_ids]])
    seen, logits = reference_sight(directory, tower, decode_image(data, ""), whole, **more(whole))
    assert torch.cosine_similarity(embedding.embeddings.float(), seen, dim=-1).min() > 0.9999
    expected = logits[0, len(ids) - 1 : -1].log_softmax(-1)
    assert answer.token_ids == expected.argmax(-1).tolist()
    assert logprobs(answer) == pytest.approx(expected.amax(-1).tolist(), abs=0.02)
    return ids


def vision_of(container: ExllamaV3Container) -> Vision:
    assert container.vision is not None
    return container.vision


# --- where there is no tower ------------------------------------------------------------------------------------------


def created(directory: Path, **settings: Any) -> ExllamaV3Container:
    return ExllamaV3Container.create(directory, load_settings(cache_size=512, max_seq_len=512, **settings))


@pytest.mark.anyio
async def test_a_tower_is_used_only_when_asked_for(tiny_vision: Path, log_lines: list[str]) -> None:
    container = created(tiny_vision)
    assert (container.has_vision, container.warnings) == (True, [])
    assert any("set model.vision" in line for line in log_lines)
    await container.see(shown("X", {"X": picture()}))
    with pytest.raises(Unsupported, match="takes no images"):
        encoded(container, "X", {"X": picture()})


@pytest.mark.anyio
async def test_a_text_model_takes_no_images(llama: ExllamaV3Container) -> None:
    assert (llama.info().use_vision, llama.info().has_vision) == (False, False)
    with pytest.raises(Unsupported, match="takes no images"):
        await answered(llama, "X", images=shown("X", {"X": picture()}))


def test_a_model_without_a_tower_warns(tiny_hybrid: Path) -> None:
    container = created(tiny_hybrid, vision=True)
    assert container.warnings == ["model.vision has no effect: tiny-hybrid has no vision tower."]


def test_the_files_of_a_text_model_may_name_a_tower_that_they_leave_out(tiny_vision: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for path in tiny_vision.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tiny_vision / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if ".visual." not in name}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    container = created(tmp_path, vision=True)
    assert not container.has_vision
    assert "has no vision tower" in container.warnings[0]


def test_the_engine_takes_no_images_beside_a_draft_model(tiny_vision: Path) -> None:
    """Which would end its generator for everybody."""
    container = created(tiny_vision, vision=True)
    container.draft = Draft("model", "small", container.model, None)
    assert container._vision(find_tower(container.config)) is None
    assert "while a draft model drafts" in container.warnings[-1]
