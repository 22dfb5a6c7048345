from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import backends.exllamav3.engine  # noqa: F401  (installs the kernels)
from backends.exllamav3.cpu.exl3 import Codebook, decode, numbers, unpacked_signs
from backends.exllamav3.engine import Config, Linear, Model, kernels
from tests import exl3
from tests.exl3_converter import converter, needs_converter
from tests.models import VOCABULARY

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are installed where there is no GPU")

CODEBOOKS = {None: Codebook.THREE_INSTRUCTIONS, "mcg": Codebook.MCG, "mul1": Codebook.MUL1}
RATES: list[tuple[float, str | None]] = [
    *((bits, codebook) for codebook in CODEBOOKS for bits in range(1, 9)),
    *((bits, "mul1") for bits in (1.5, 2.5, 3.5)),
]


def decoded(tensors: dict[str, Tensor]) -> Tensor:
    codebook = next((name for name in ("mcg", "mul1") if name in tensors), None)
    return decode(tensors["trellis"], tensors["suh"], tensors["svh"], CODEBOOKS[codebook])


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CODEBOOKS)
def test_every_state_is_the_number_that_the_engine_makes_of_it(name: str | None) -> None:
    table = numbers(CODEBOOKS[name]).numpy()
    assert np.array_equal(table, exl3.numbers(name).astype(np.float32))
    if name == "mul1":  # the engine has this one in Python too
        engine = importlib.import_module("exllamav3.modules.quant.exl3_lib.ngram_codec").mul1_codebook("cpu")
        assert np.array_equal(table, engine.float().numpy())


@pytest.mark.parametrize(("bits", "codebook"), RATES)
def test_a_matrix_is_what_its_tensors_stand_for(bits: float, codebook: str | None) -> None:
    matrix = exl3.random_matrix((128, 256), bits, codebook, seed=int(2 * bits))
    weight = decoded(matrix.tensors)
    assert weight.dtype == torch.half
    assert weight.is_contiguous()
    assert (weight.float() - matrix.weight).abs().max() < 2**-9  # fp16 of numbers up to 4


def test_a_matrix_of_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = exl3.random_matrix((640, 256), 3, "mcg")
    monkeypatch.setattr("backends.exllamav3.cpu.exl3.CHUNK", 2 * 128 * 256)
    assert (decoded(matrix.tensors).float() - matrix.weight).abs().max() < 2**-9


@pytest.mark.parametrize(("bits", "codebook"), [(3, "mcg"), (2.5, "mul1"), (4, None)])
def test_a_matrix_is_what_the_engine_reconstructs(
    bits: float, codebook: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`LinearEXL3.get_weight_tensor`, over what its CUDA kernel makes of the trellis; it rounds to fp16 in between."""
    matrix = exl3.random_matrix((256, 128), bits, codebook)
    monkeypatch.setattr(kernels, "BC_LinearEXL3", lambda *arguments: None, raising=False)
    monkeypatch.setattr(kernels, "reconstruct", lambda out, *arguments: out.copy_(matrix.inner), raising=False)
    layer = importlib.import_module("exllamav3.modules.quant.exl3").LinearEXL3(None, 128, 256, **matrix.tensors)
    torch.testing.assert_close(decoded(matrix.tensors).T, layer.get_weight_tensor(), atol=2**-8, rtol=0)


@needs_converter
@pytest.mark.parametrize(("bits", "codebook"), [(3, "mcg"), (2.5, "mul1"), (4, None)])
def test_what_the_engines_quantiser_writes_is_read_as_it_means_it(bits: float, codebook: str | None) -> None:
    """Without calibration; test_exl3_conversion.py has the rest."""
    quantiser = importlib.import_module("exllamav3.modules.quant.exl3_lib.quantize")
    arguments: dict[str, Any] = {"K": bits, "seed": 0, "devices": ["cpu"], "apply_out_scales": True}
    if codebook is not None:
        arguments[codebook] = True
    uncalibrated = {"H": torch.zeros(128, 128, device="meta"), "device": torch.device("cpu")}
    original = torch.randn(128, 128) * torch.rand(128) * 0.1
    with converter():
        meant, _, tensors = quantiser.quantize_exl3(original.clone(), uncalibrated, arguments, return_weight_q=True)
    assert (decoded(tensors).T.float() - meant).abs().max() < 2**-11
    assert torch.corrcoef(torch.stack((meant.flatten(), original.flatten())))[0, 1] > 0.9


def test_scales_of_the_older_form_are_signs() -> None:
    engine = importlib.import_module("exllamav3.modules.quant.exl3").LinearEXL3
    packed = torch.randint(-(2**15), 2**15, (8,)).to(torch.int16)
    signs = unpacked_signs(packed)
    assert signs.unique().tolist() == [-1.0, 1.0]

    class Layer:
        transformers_fix = False

    assert torch.equal(signs, engine.unpack_bf(Layer(), packed))


@pytest.mark.parametrize(
    ("trellis", "suh", "svh", "message"),
    [
        (torch.zeros(8, 8, 72, dtype=torch.int16), 128, 128, r"\(8, 8, 72\) in torch.int16 has no bitrate .* MCG"),
        (torch.zeros(8, 8, 56, dtype=torch.int16), 128, 128, "no bitrate"),  # 3.5 bits need another codebook
        (torch.zeros(8, 8, 50, dtype=torch.int16), 128, 128, "no bitrate"),
        (torch.zeros(8, 8, 48, dtype=torch.int32), 128, 128, "in torch.int32 has no bitrate"),
        (torch.zeros(8, 48, dtype=torch.int16), 128, 128, "no bitrate"),
        (torch.zeros(8, 8, 48, dtype=torch.int16), 64, 128, r"has \(64,\) and \(128,\)"),
        (torch.zeros(8, 9, 48, dtype=torch.int16), 128, 144, "multiples of 128"),
    ],
)
def test_tensors_that_are_no_matrix_are_refused(trellis: Tensor, suh: int, svh: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(trellis, torch.ones(suh).half(), torch.ones(svh).half(), Codebook.MCG)


# --- layers -----------------------------------------------------------------------------------------------------------


def edited(source: Path, folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> Config:
    """The configuration of a copy of a model with other tensors."""
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix == ".json":
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return Config.from_directory(str(folder))


LAYER = "model.layers.0.self_attn.q_proj"


def test_a_layer_is_an_unquantised_one_without_padding(tiny_exl3: Path, tmp_path: Path) -> None:
    bias = torch.randn(256).half()
    config = edited(tiny_exl3, tmp_path / "model", lambda tensors: tensors.update({f"{LAYER}.bias": bias}))
    layer = Linear(config, LAYER, 192, 192)
    layer.load(torch.device("cpu"))
    assert layer.quant_type == "fp16"
    assert layer.quant_format_id() is None
    expected = load_file(tiny_exl3 / "decoded" / "model.safetensors")[f"{LAYER}.weight"]
    torch.testing.assert_close(layer.inner.weight.T, expected, atol=2e-4, rtol=0)
    x = torch.randn(3, 192).half()
    torch.testing.assert_close(
        layer.forward(x, {}, torch.float), x.float() @ expected.float().T + bias[:192].float(), atol=2e-2, rtol=0
    )
    config.stc.close()


def test_older_signs_and_scales_are_taken_from_where_they_are(tiny_exl3: Path, tmp_path: Path) -> None:
    def pack(tensors: dict[str, Tensor]) -> None:
        negative = (tensors.pop(f"{LAYER}.suh") < 0).numpy()
        tensors[f"{LAYER}.su"] = torch.from_numpy(np.packbits(negative, bitorder="little").view(np.int16))

    config = edited(tiny_exl3, tmp_path / "model", pack)
    layer = Linear(config, LAYER, 192, 192)
    layer.load(torch.device("cpu"))
    expected = load_file(tiny_exl3 / "decoded" / "model.safetensors")[f"{LAYER}.weight"]
    torch.testing.assert_close(layer.inner.weight.T, expected, atol=2e-4, rtol=0)
    config.stc.close()


def test_a_layer_that_its_tensors_do_not_fit_is_refused(tiny_exl3: Path, tmp_path: Path) -> None:
    config = Config.from_directory(str(tiny_exl3))
    with pytest.raises(ValueError, match=r"q_proj is \(out, in\) \(256, 256\), .* makes it \(192, 512\)"):
        Linear(config, LAYER, 512, 192).load(torch.device("cpu"))
    config.stc.close()

    def cut(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER}.svh"] = tensors[f"{LAYER}.svh"][:128].clone()

    config = edited(tiny_exl3, tmp_path / "model", cut)
    with pytest.raises(ValueError, match=r"q_proj is damaged\. A trellis .* Download the model again\."):
        Linear(config, LAYER, 192, 192).load(torch.device("cpu"))
    config.stc.close()


@pytest.mark.parametrize("name", ["suh", "svh"])
def test_a_layer_without_its_scales_is_refused(tiny_exl3: Path, tmp_path: Path, name: str) -> None:
    config = edited(tiny_exl3, tmp_path / "model", lambda tensors: tensors.pop(f"{LAYER}.{name}"))
    with pytest.raises(ValueError, match=r"q_proj is damaged\. .* no suh or no svh .* Download the model again\."):
        Linear(config, LAYER, 192, 192).load(torch.device("cpu"))
    config.stc.close()


def test_no_layer_of_a_model_is_left_quantised(tiny_exl3: Path) -> None:
    model = Model.from_config(Config.from_directory(str(tiny_exl3)))
    model.load(progressbar=False)
    layers = [module for module in model if isinstance(module, Linear)]
    assert len(layers) == 4 * 7 + 1
    assert {(layer.quant_type, type(layer.inner).__name__) for layer in layers} == {("fp16", "LinearFP16")}
    model.unload()


def test_a_quantised_table_of_embeddings_needs_no_kernel(tiny_exl3: Path, tmp_path: Path) -> None:
    """Kept as it is: the engine decodes the rows that it looks up, in Python where there is no GPU."""
    codec = importlib.import_module("exllamav3.modules.quant.exl3_lib.ngram_codec")
    rows = torch.randint(-(2**15), 2**15, (VOCABULARY, 65)).to(torch.int16)
    rows[:, 0] = torch.tensor(0.08).half().view(torch.int16)
    signs = (torch.randint(0, 2, (1, 256)) * 2 - 1).half()

    def quantise_table(tensors: dict[str, Tensor]) -> None:
        del tensors["model.embed_tokens.weight"]
        tensors.update({"model.embed_tokens.trellis": rows, "model.embed_tokens.signs": signs})

    model = Model.from_config(edited(tiny_exl3, tmp_path / "model", quantise_table))
    model.load(progressbar=False)
    ids = torch.tensor([[5, 900, 5, 17]])
    expected = codec.dequant_rows(rows[ids[0]], 4, codec.mul1_codebook("cpu"), signs=signs.expand(4, -1))
    torch.testing.assert_close(model.modules[0].forward(ids, {})[0].float(), expected[:, :192], atol=2e-4, rtol=0)
    model.unload()
