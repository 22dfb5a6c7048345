"""The tokenizer of all tiny models, trained on a made-up corpus."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

SPECIAL_TOKENS = ("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>")
BOS_ID, PAD_ID, EOS_ID = 0, 2, 4
VOCABULARY = 1024
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def write_tokenizer(directory: Path, *, add_bos: bool = False, special_tokens: Sequence[str] = SPECIAL_TOKENS) -> None:
    """A byte-level BPE of 1,024 tokens, with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY, "the corpus is too small for the vocabulary"
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "pad_token": "<pad>",
        "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 16384,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def corpus() -> Iterator[str]:
    """Prose, code and JSON from a few words, the same everywhere."""
    people = ("Ada", "Basil", "Carmen", "Dmitri", "Esther", "Farid", "Greta", "Hiroshi", "Ines", "Jonas")
    verbs = ("measured", "carried", "painted", "answered", "gathered", "followed", "repaired", "described", "counted")
    things = ("river", "lantern", "engine", "garden", "letter", "mountain", "window", "harvest", "compass", "orchard")
    places = ("harbour", "station", "library", "valley", "workshop", "market", "bridge", "island", "kitchen", "forest")
    manners = ("slowly", "carefully", "together", "without", "warning", "before", "morning")
    for index, (person, verb, thing) in enumerate(itertools.product(people, verbs, things)):
        place, manner = places[index * 7 % len(places)], manners[index * 5 % len(manners)]
        other = things[index * 3 % len(things)]
        yield f"{person} {verb} the {thing} near the {place}, {manner}, because the {other} had not been {verb} yet.\n"
        yield f"def {verb}_{thing}({other}, index={index}):\n    return [{other} for {place} in range({index})]\n"
        yield f'{{"name": "{person}", "{thing}": {index}, "place": "{place}", "{other}": [true, false, null]}}\n'
