"""Drafts of every kind on the real engine, and drafters that do not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.exllamav3.drafters import check_pair
from backends.exllamav3.model import ExllamaV3Container
from common.config_models import DraftModelConfig
from common.errors import InvalidRequest, ModelNotFound, ServerError
from tests.containers import answered, loaded
from tests.models import announce_prediction_head
from tests.scripted import load_settings

PROMPT = [5 + index % 40 for index in range(300)]
MODEL, MODE = "draft_model.draft_model_name", "draft_model.draft_mode"


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def drafted_by(directory: Path, **settings: object) -> DraftModelConfig:
    return DraftModelConfig.model_validate(
        {"draft_model_dir": str(directory.parent), "draft_model_name": directory.name, **settings}
    )


def create(directory: Path, draft: DraftModelConfig) -> ExllamaV3Container:
    settings = load_settings(cache_size=8192, max_seq_len=8192)
    return ExllamaV3Container.create(directory, settings.model_copy(update={"draft_model": draft}))


# --- drafts -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mtp", "hybrid drafted for", "sliding"])
async def test_no_draft_changes_a_token(kind: str, request: pytest.FixtureRequest) -> None:
    """Nor what a model with recurrent layers finds in its cache afterwards."""
    match kind:
        case "hybrid drafted for":
            model, drafter = (request.getfixturevalue(name) for name in ("tiny_hybrid", "tiny_llama"))
            draft = drafted_by(drafter, draft_num_tokens=3)
        case "mtp":
            model = request.getfixturevalue("tiny_mtp")
            draft = DraftModelConfig(draft_mode="mtp")
        case _:
            model = request.getfixturevalue("tiny_sliding")
            draft = drafted_by(model)
    async with loaded(model) as container:
        plain = await answered(container, PROMPT, max_tokens=20)
    async with loaded(model, draft_model=draft) as container:
        info = container.info()
        assert (info.draft_mode, info.draft_model_name) == (draft.draft_mode, draft.draft_model_name or model.name)
        first, again = [await answered(container, PROMPT, max_tokens=20) for _ in range(2)]
    assert first.token_ids == again.token_ids == plain.token_ids
    assert again.finish.usage.cached_tokens == 256
    usage = first.finish.usage
    assert usage.accepted_draft_tokens + usage.rejected_draft_tokens > 0
    if kind == "sliding":  # a model agrees with itself
        assert usage.rejected_draft_tokens == 0


# --- drafters that do not fit -----------------------------------------------------------------------------------------


class Drafter:
    """A draft model, as far as the checks go."""

    def __init__(self, refusal: str = "", **caps: bool) -> None:
        self.caps = caps
        self._refusal = refusal

    def __iter__(self) -> Iterator[object]:
        return iter(())

    def attach_to(self, model: object) -> None:
        assert not self._refusal, self._refusal


@pytest.mark.parametrize(
    "drafter",
    [
        Drafter(mtp_draft=True, recurrent_states=True),
        Drafter("hidden sizes differ", attach_target=True),
        Drafter(draft_uses_target_cache=True),
    ],
)
def test_a_pair_that_the_engine_would_refuse_is_refused_before_loading(drafter: Drafter) -> None:
    with pytest.raises(InvalidRequest) as raised:
        check_pair(drafter, object(), MODEL, tensor_parallel=True)
    assert raised.value.param == MODEL
    for fitting in (Drafter(recurrent_states=True), Drafter(attach_target=True), Drafter(draft_uses_target_cache=True)):
        check_pair(fitting, object(), MODEL, tensor_parallel=False)


def test_a_prediction_head_must_be_there(tiny_llama: Path, tiny_vision: Path, tmp_path: Path) -> None:
    stripped = tmp_path / "stripped"
    shutil.copytree(tiny_vision, stripped)
    edit_json(stripped / "config.json", announce_prediction_head)
    for model, message in ((tiny_llama, "has no multi-token prediction head"), (stripped, "its files do not hold it")):
        with pytest.raises(InvalidRequest, match=message) as raised:
            create(model, DraftModelConfig(draft_mode="mtp"))
        assert raised.value.param == MODE


def quantised(folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.update(quantization_config={"quant_method": "awq"}))


def other_words(count: int) -> Callable[[Path], None]:
    """Swaps tokens with each other."""

    def change(tokenizer: dict[str, Any]) -> None:
        vocabulary = tokenizer["model"]["vocab"]
        names = sorted(vocabulary, key=vocabulary.__getitem__)[-count:]
        vocabulary |= dict(zip(names, [vocabulary[name] for name in reversed(names)], strict=True))

    return lambda folder: edit_json(folder / "tokenizer.json", change)


def fewer_tokens(folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.update(vocab_size=512))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (quantised, "drafter is quantised as awq"),
        (other_words(40), "has another tokenizer: 40 of 1024 tokens differ"),
        (fewer_tokens, "knows 512 tokens, the model 1024"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer of the draft model drafter"),
        (lambda folder: (folder / "model.safetensors").unlink(), "drafter is incomplete"),
    ],
)
def test_draft_models_that_cannot_draft(
    spoil: Callable[[Path], object], message: str, tiny_llama: Path, tmp_path: Path
) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(tiny_llama, drafter)
    spoil(drafter)
    with pytest.raises(InvalidRequest, match=message) as raised:
        create(tiny_llama, drafted_by(drafter))
    assert raised.value.param == MODEL


def test_a_few_other_tokens_are_advice(tiny_llama: Path, tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(tiny_llama, drafter)
    other_words(2)(drafter)
    (warning,) = create(tiny_llama, drafted_by(drafter)).warnings
    assert warning.startswith("2 tokens are others for the draft model drafter")
    (drafter / "tokenizer.json").unlink()  # as of drafters that are made for one model
    assert create(tiny_llama, drafted_by(drafter)).warnings == []


@pytest.mark.parametrize(("name", "kind"), [("nothing", ModelNotFound), ("../x", InvalidRequest)])
def test_folders_that_are_no_draft_model(name: str, kind: type[ServerError], tiny_llama: Path) -> None:
    with pytest.raises(kind) as raised:
        create(tiny_llama, drafted_by(tiny_llama, draft_model_name=name))
    assert raised.value.param == MODEL


@pytest.mark.parametrize("name", ["draft_num_tokens", "hybrid_draft_tokens"])
def test_drafts_leave_room_for_prompts(name: str, tiny_llama: Path) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} 5000 is more than half") as raised:
        create(tiny_llama, DraftModelConfig.model_validate({"draft_mode": "ngram", name: 5000}))
    assert raised.value.param == f"draft_model.{name}"
