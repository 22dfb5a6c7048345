"""Adapters on the real engine, compared with models that have them merged into their weights."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from backends.exllamav3.engine import Config, Model
from backends.exllamav3.lora import ModelAdapters
from backends.exllamav3.model import ExllamaV3Container
from backends.messages import Lora
from common.config_models import LoraConfig, LoraInstance, MemoryConfig
from common.errors import InvalidRequest, NotFound, Unsupported
from tests.adapters import ALPHA, RANK, layers, make_adapter, merge, write_adapter
from tests.containers import Answer, answered, loaded
from tests.models.writing import language_model, write

PROMPT = [5 + index % 40 for index in range(300)]
LONG = [5 + index * index % 900 for index in range(600)]
# Of log-probabilities: products of half-precision numbers are added in another order.
CLOSE = 0.03


@pytest.fixture(scope="module")
def lora_dir(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    folder = tmp_path_factory.mktemp("loras")
    make_adapter(folder / "poet", tiny_llama)
    make_adapter(folder / "clerk", tiny_llama, ["q_proj"])
    return folder


@pytest.fixture(scope="module")
async def container(lora_dir: Path, tiny_llama: Path) -> AsyncIterator[ExllamaV3Container]:
    async with loaded(tiny_llama, lora=LoraConfig(lora_dir=str(lora_dir))) as container:
        yield container


async def told(container: ExllamaV3Container, prompt: Sequence[int] = PROMPT) -> Answer:
    return await answered(container, list(prompt), max_tokens=6, logprobs=0)


def differs(one: Answer, other: Answer) -> float:
    """The greatest difference of log-probabilities up to the first token that differs."""
    pairs = list(zip(one.logprobs, other.logprobs, strict=True))
    same = next((index for index, (a, b) in enumerate(pairs) if a.token_id != b.token_id), len(pairs))
    return max(abs(a.logprob - b.logprob) for a, b in pairs[: same + 1])


# --- what the model computes ------------------------------------------------------------------------------------------


def make_phi(directory: Path) -> Path:
    """Its checkpoint has one weight for queries, keys and values, and one for gate and up."""
    settings = language_model(num_hidden_layers=2, max_position_embeddings=4096)
    return write(directory, "Phi3ForCausalLM", settings)


DELTA_NET = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "q_proj", "down_proj", "lm_head")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "targets"),
    [("tiny_hybrid", DELTA_NET), ("phi", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"))],
)
async def test_an_adapter_gives_what_the_merged_model_gives(
    model: str, targets: Sequence[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    plain = make_phi(tmp_path / "phi") if model == "phi" else request.getfixturevalue(model)
    adapter = make_adapter(tmp_path / "loras" / "a", plain, targets)
    async with loaded(merge(tmp_path / "merged", plain, adapter)) as container:
        expected = await told(container)
    async with loaded(plain, lora=LoraConfig(lora_dir=str(tmp_path / "loras"))) as container:
        without = await told(container, LONG)
        container.set_loras([Lora("a", 1.0)])
        assert differs(await told(container), expected) < CLOSE
        adapted = await told(container, LONG)
        container.set_loras([])
        again = await told(container, LONG)
    assert differs(without, adapted) > CLOSE
    assert adapted.finish.usage.cached_tokens < 10  # a few from the prompt before
    assert differs(without, again) < 1e-3  # computed in other pieces
    assert again.finish.usage.cached_tokens >= 512


async def test_scaling_and_several_adapters(container: ExllamaV3Container, tiny_llama: Path, tmp_path: Path) -> None:
    without = await told(container)
    container.set_loras([Lora("poet", 0.0)])
    off = await told(container)
    assert differs(without, off) < 1e-4  # computed in other pieces
    assert off.finish.usage.cached_tokens > 0  # the model computes as before
    assert container.info().loras == [Lora("poet", 0.0)]

    lora_dir = Path(container.settings.lora.lora_dir)
    half = merge(tmp_path / "half", tiny_llama, lora_dir / "poet", 0.5)
    both = merge(tmp_path / "both", half, lora_dir / "clerk", 2.0)
    container.set_loras([Lora("poet", 0.5), Lora("clerk", 2.0)])
    applied = await told(container)
    container.set_loras([])
    async with loaded(both) as merged:
        assert differs(applied, await told(merged)) < CLOSE


async def test_a_model_is_loaded_with_the_adapters_of_its_settings(
    container: ExllamaV3Container, lora_dir: Path, tiny_llama: Path
) -> None:
    container.set_loras([Lora("poet", 0.5)])
    changed = await told(container)
    container.set_loras([])
    lora = LoraConfig(lora_dir=str(lora_dir), loras=[LoraInstance(name="poet", scaling=0.5)])
    async with loaded(tiny_llama, lora=lora) as loaded_with:
        assert loaded_with.info().loras == [Lora("poet", 0.5)]
        assert differs(changed, await told(loaded_with)) == 0


# --- what is cached ---------------------------------------------------------------------------------------------------


async def test_nothing_cached_is_shared_between_sets_of_adapters(container: ExllamaV3Container) -> None:
    """Neither whole pages nor the beginning of one that another prompt shares; each set finds its own again."""
    similar = [*LONG[:100], *range(400, 500)]  # shares a part of its first page
    first = {}
    for name in ("", "poet", "clerk"):
        container.set_loras([Lora(name, 1.0)] if name else [])
        assert (await told(container, similar)).finish.usage.cached_tokens < 10  # of tests before
        first[name] = await told(container, LONG)
        assert first[name].finish.usage.cached_tokens <= 100
    for name in ("poet", "", "clerk"):
        container.set_loras([Lora(name, 1.0)] if name else [])
        again = await told(container, LONG)
        assert again.finish.usage.cached_tokens >= 512, name
        assert differs(first[name], again) < 1e-3  # computed in other pieces
    container.set_loras([])
    assert differs(first[""], first["poet"]) > CLOSE


@pytest.mark.slow
async def test_pages_on_disk_belong_to_a_set_of_adapters(tiny_llama: Path, lora_dir: Path, tmp_path: Path) -> None:
    memory = MemoryConfig(sysmem_kv_cache=16, disk_cache_dir=str(tmp_path / "disk"))
    cached = []
    for loras in ([], [LoraInstance(name="poet")], [LoraInstance(name="poet")], []):
        lora = LoraConfig(lora_dir=str(lora_dir), loras=loras)
        async with loaded(tiny_llama, lora=lora, memory=memory) as container:
            cached.append((await told(container, LONG)).finish.usage.cached_tokens)
            await container.flush()
    assert cached == [0, 0, 512, 512]


# --- shortcuts of the engine ------------------------------------------------------------------------------------------


class Shortcut:
    """In place of what the engine makes on a GPU; fails when it is used."""


async def test_shortcuts_through_quantised_weights_are_not_taken(
    container: ExllamaV3Container, tiny_llama: Path
) -> None:
    """On a GPU the engine decodes quantised models with them, and they know nothing of adapters."""
    attention = [module for module in container.model if type(module).__name__ == "Attention"]
    gated = [module for module in container.model if type(module).__name__ == "GatedMLP"]
    assert len(attention) == len(gated) == 4
    shortcuts = {name: Shortcut() for name in ("multi_qkv", "multi_qg", "multi_kv")}
    for module in attention:
        vars(module).update(shortcuts)
    for module in gated:
        module.bc, module.multi_gu = Shortcut(), [Shortcut()]
    try:
        container.set_loras([Lora("poet", 1.0)])
        assert (await told(container)).finish.usage.completion_tokens == 6
        assert all(module.bc_attn.get("any layer") is False for module in attention)
        container.set_loras([])
        assert all(shortcuts.items() <= vars(module).items() for module in attention)
        assert all(module.bc_attn == {} and module.bc_attn.get("any layer") is None for module in attention)
        assert all(isinstance(module.bc, Shortcut) and isinstance(module.multi_gu[0], Shortcut) for module in gated)
        # Of the other adapter's layers only.
        container.set_loras([Lora("clerk", 1.0)])
        assert all(module.multi_qkv is None for module in attention)
        assert all(isinstance(module.bc, Shortcut) for module in gated)
    finally:
        container.set_loras([])
        for module in attention:
            vars(module).update(dict.fromkeys(shortcuts))
        for module in gated:
            module.bc, module.multi_gu = None, [None]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama_model(tiny_llama: Path) -> Model:
    return Model.from_config(Config.from_directory(str(tiny_llama)))


def adapters_in(folder: Path, model: Model, *, tensor_parallel: bool = False) -> ModelAdapters:
    return ModelAdapters(model, "tiny-llama", folder, tensor_parallel=tensor_parallel)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "LOHA"}, "of the kind 'LOHA'"),
        ({"peft_type": None}, "of the kind None"),
        ({"use_dora": True}, "does not apply: DoRA"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "does not apply: biases"),
        ({"lora_bias": True}, "lora_bias"),
        ({"r": 0}, "r 0 and lora_alpha"),
        ({"r": "8"}, "r '8'"),
        ({"r": 8 * "long " * 1000}, "r 'long long"),
        ({"lora_alpha": None}, "lora_alpha None"),
        ({"lora_alpha": 10**400}, "no numbers to scale with"),
        ({"lora_alpha": math.inf}, "no numbers to scale with"),
        ({"r": 8}, "another rank than it says"),
        ({"alpha_pattern": [1]}, "no mapping alpha_pattern"),
        ({"alpha_pattern": {"(a+)+$": 2}}, "no name of a layer"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "with a number"),
    ],
)
def test_configurations_that_cannot_be_applied(
    config: dict[str, Any], message: str, llama_model: Model, tiny_llama: Path, tmp_path: Path
) -> None:
    make_adapter(tmp_path / "a", tiny_llama, ["q_proj"])
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | config), encoding="utf-8")
    with pytest.raises(InvalidRequest) as raised:
        adapters_in(tmp_path, llama_model).find("a", 1.0, "loras.0.name")
    assert message in raised.value.message
    assert len(raised.value.message) < 400
    assert raised.value.param == "loras.0.name"


def change_weights(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / "adapter_model.safetensors")
        change(weights)
        save_file(weights, folder / "adapter_model.safetensors")

    return spoil


def only_pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def renamed(weights: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {name.replace(old, new, 1): weight.clone() for name, weight in weights.items()}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (only_pickle, "could run code"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "is incomplete"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\0" * 100), "cannot be read"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "is not JSON"),
        (change_weights(lambda weights: weights.pop(KEY)), "only one of two weights"),
        (change_weights(dict.clear), "holds no weights"),
        (change_weights(lambda weights: weights.update({"lm_head.weight": weights[KEY].clone()})), "lm_head"),
        (change_weights(lambda weights: weights.update({KEY: weights[KEY].int()})), "format that the engine"),
        (change_weights(lambda weights: weights.update({"\n" * 9999: weights[KEY].clone()})), r"'\n\n"),
        (
            change_weights(lambda weights: weights.update(renamed(weights, "base_model.model.", ""))),
            "layer of tiny-llama twice",
        ),
        (
            change_weights(lambda weights: weights.update(renamed(weights, ".weight", ".default.weight"))),
            "beside those of linear layers",
        ),
        (change_weights(lambda weights: weights.update({KEY: weights[KEY][:, :64].contiguous()})), "other sizes"),
    ],
)
def test_files_that_cannot_be_applied(
    spoil: Callable[[Path], object], message: str, llama_model: Model, tiny_llama: Path, tmp_path: Path
) -> None:
    spoil(make_adapter(tmp_path / "a", tiny_llama, ["q_proj"]))
    with pytest.raises(InvalidRequest) as raised:
        adapters_in(tmp_path, llama_model).find("a", 1.0, "name")
    assert message in raised.value.message
    assert str(tmp_path) not in raised.value.message
    assert len(raised.value.message) < 400


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: weights.update({KEY: weights[KEY][:, :64].contiguous()}),
        lambda weights: weights.update({KEY: weights[KEY].int()}),
        lambda weights: weights.pop(KEY),
    ],
    ids=["smaller", "integers", "missing"],
)
def test_an_adapter_that_is_overwritten_between_check_and_load(
    change: Callable[[dict[str, Any]], None], llama_model: Model, tiny_llama: Path, tmp_path: Path
) -> None:
    make_adapter(tmp_path / "a", tiny_llama, ["q_proj"])
    adapters = adapters_in(tmp_path, llama_model)
    adapter = adapters.find("a", 1.0, "name")
    change_weights(change)(tmp_path / "a")
    with pytest.raises(
        InvalidRequest, match=r"overwritten after it had been checked: .*q_proj|cannot be read any more"
    ):
        adapters.apply([adapter])
    assert adapters.active == ()


def test_the_cache_knows_an_adapter_by_what_was_applied(llama_model: Model, tiny_llama: Path, tmp_path: Path) -> None:
    """Whatever the files are by then."""
    adapters = adapters_in(tmp_path, llama_model)
    roots = []
    for name, size in (("a", 0.1), ("same", 0.1), ("other", 0.2)):
        make_adapter(tmp_path / name, tiny_llama, ["q_proj"], size=size)
        adapters.apply([adapters.find(name, 1.0, "name")])
        roots.append(adapters.root)
    adapters.remove()
    assert roots[0] is not None
    assert (roots[0] == roots[1], roots[0] == roots[2]) == (True, False)


def test_an_adapter_that_lists_too_many_weights(
    llama_model: Model, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its header is not even read where it is too long."""
    weights = len(layers(tiny_llama)) * 2
    for limit, most_bytes, refused in ((weights, 1 << 20, False), (3, 1 << 20, True), (weights, 100, True)):
        folder = make_adapter(tmp_path / str(most_bytes) / str(limit), tiny_llama, ["q_proj", "k_proj"])
        monkeypatch.setattr("backends.exllamav3.lora.MAX_ADAPTER_WEIGHTS", limit)
        monkeypatch.setattr("backends.exllamav3.lora._MOST_HEADER_BYTES", most_bytes)
        adapters = adapters_in(folder.parent, llama_model)
        if refused:
            with pytest.raises(Unsupported, match="lists more than"):
                adapters.find(folder.name, 1.0, "name")
        else:
            assert adapters.find(folder.name, 1.0, "name").pairs


def test_an_adapter_of_another_model_says_what_is_missing_and_what_it_was_made_for(
    llama_model: Model, tiny_hybrid: Path, tmp_path: Path
) -> None:
    make_adapter(tmp_path / "a", tiny_hybrid, ["in_proj_qkv"], base_model_name_or_path="example/hybrid-0.1b")
    with pytest.raises(InvalidRequest, match=r"has no .*in_proj_qkv.* It was made for example/hybrid-0.1b\."):
        adapters_in(tmp_path, llama_model).find("a", 1.0, "name")


def test_experts_take_no_adapter_and_attention_beside_them_does(tiny_moe: Path, tmp_path: Path) -> None:
    model = Model.from_config(Config.from_directory(str(tiny_moe)))
    make_adapter(tmp_path / "attention", tiny_moe, ["q_proj"])
    make_adapter(tmp_path / "experts", tiny_moe, ["experts.0.up_proj"])
    assert adapters_in(tmp_path, model).find("attention", 1.0, "name").pairs
    with pytest.raises(Unsupported, match="in layers of the kind BlockSparseMLP"):
        adapters_in(tmp_path, model).find("experts", 1.0, "name")


def test_tensor_parallel_and_unknown_names(llama_model: Model, tiny_llama: Path, tmp_path: Path) -> None:
    make_adapter(tmp_path / "a", tiny_llama, ["q_proj"])
    with pytest.raises(Unsupported, match=r"model\.tensor_parallel"):
        adapters_in(tmp_path, llama_model, tensor_parallel=True).find("a", 1.0, "name")
    with pytest.raises(NotFound, match="no adapter 'b'"):
        adapters_in(tmp_path, llama_model).find("b", 1.0, "name")
    with pytest.raises(InvalidRequest, match="inside lora"):
        adapters_in(tmp_path, llama_model).find("../a", 1.0, "name")


async def test_what_cannot_be_applied_leaves_what_is(container: ExllamaV3Container) -> None:
    """Also where only the numbers show it, which are read last."""
    container.set_loras([Lora("clerk", 1.0)])
    before = await told(container)
    problems = container.check_loras([Lora("poet", 1.0), Lora("nobody", 1.0)])
    assert problems[0] is None
    assert problems[1] is not None
    assert problems[1].param == "loras.1.name"
    for loras in ([Lora("poet", 1.0), Lora("nobody", 1.0)], [Lora("poet", 1e308)]):
        with pytest.raises((InvalidRequest, NotFound)):
            container.set_loras(loras)
        assert container.info().loras == [Lora("clerk", 1.0)]
    after = await told(container)
    assert differs(before, after) < 1e-3  # computed in other pieces
    assert after.finish.usage.cached_tokens > 0
    container.set_loras([])


# --- scaling as PEFT has it -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "factor"),
    [
        ({}, ALPHA / RANK),
        ({"use_rslora": True}, ALPHA / math.sqrt(RANK)),
        ({"alpha_pattern": {"q_proj": 2}}, 2 / RANK),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 2}}, 2 / RANK),
        ({"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 2}}, 2 / RANK),
        ({"alpha_pattern": {"^q_proj": 2, "k_proj": 3}}, ALPHA / RANK),
        ({"r": 64, "rank_pattern": {"q_proj": RANK}}, ALPHA / RANK),
    ],
)
def test_factors(config: dict[str, Any], factor: float, llama_model: Model, tiny_llama: Path, tmp_path: Path) -> None:
    make_adapter(tmp_path / "a", tiny_llama, ["layers.0.self_attn.q_proj"])
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | config), encoding="utf-8")
    (pair,) = adapters_in(tmp_path, llama_model).find("a", 1.0, "name").pairs
    assert pair.factor == pytest.approx(factor)


def test_weights_are_padded_as_the_engine_pads_those_of_layers(
    llama_model: Model, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, to multiples of 128; what a layer gives may be cut back to its size."""
    make_adapter(tmp_path / "a", tiny_llama, ["layers.0.self_attn.q_proj"])
    adapter = adapters_in(tmp_path, llama_model).find("a", 1.0, "name")
    (pair,) = adapter.pairs
    (place,) = pair.places
    monkeypatch.setattr(place.linear, "in_features", 256)
    monkeypatch.setattr(place.linear, "out_features", 256)
    for trimmed, width in ((False, 256), (True, 192)):
        monkeypatch.setattr(place.linear, "trim_padded_out", trimmed)
        ((_, a, b),) = adapter.tensors()
        assert (tuple(a.shape), tuple(b.shape)) == ((256, RANK), (RANK, width))
        assert not a[192:].any()
        assert not b[:, 192:].any()


def test_names_with_the_adapter_in_them(llama_model: Model, tiny_llama: Path, tmp_path: Path) -> None:
    """As older files and those of single states have them."""
    import torch

    name = "model.layers.1.mlp.down_proj"
    outputs, inputs = layers(tiny_llama)[name]
    a, b = torch.ones(RANK, inputs), torch.ones(outputs, RANK)
    write_adapter(tmp_path / "a", {f"{name}.lora_A.default.weight": a, f"{name}.lora_B.default.weight": b})
    assert len(adapters_in(tmp_path, llama_model).find("a", 1.0, "name").pairs) == 1
