"""A tokenizer of SentencePiece's kind: blanks belong to words, and what is not in its vocabulary becomes bytes."""

from __future__ import annotations

import itertools
import json
from typing import Literal, TypeAlias

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.models import corpus

PrependScheme: TypeAlias = Literal["always", "first", "never"]
SPECIAL = ("<unk>", "<s>", "</s>")


def sentencepiece_tokenizer(scheme: PrependScheme = "first") -> Tokenizer:
    """BPE of 900 tokens, as Llama 2 and Mistral have it."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=[*SPECIAL, *alphabet], show_progress=False)
    tokenizer.train_from_iterator(itertools.islice(corpus(), 300), trainer)
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = described["added_tokens"][: len(SPECIAL)]  # the bytes are none
    return Tokenizer.from_str(json.dumps(described))
