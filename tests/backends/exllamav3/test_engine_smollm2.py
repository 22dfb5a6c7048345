"""A real model: greedy text of the demo model against transformers in fp32.

One pass of transformers over prompt and answer tells whether its own greedy text is the same: it is as long as every
token of the answer is the one it likes best at that place.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backends.exllamav3.engine import ArgmaxSampler, Cache, Config, Generator, Job, Model, Tokenizer

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "Water boils at 100 degrees because",
]


def sequences(smollm2: Path, prompts: Sequence[str], tokens: int) -> list[Tensor]:
    """Prompts with their answers, (1, prompt + tokens)."""
    config = Config.from_directory(str(smollm2))
    model = Model.from_config(config)
    cache = Cache(model, max_num_tokens=2048)
    model.load(progressbar=False)
    tokenizer = Tokenizer.from_config(config)
    generator = Generator(model=model, cache=cache, tokenizer=tokenizer)
    sequences = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt, encode_special_tokens=True)
        generator.enqueue(Job(input_ids=ids, max_new_tokens=tokens, sampler=ArgmaxSampler()))
        parts = [ids]
        while generator.num_remaining_jobs():
            parts += [chunk["token_ids"] for chunk in generator.iterate() if "token_ids" in chunk]
        sequences.append(torch.cat(parts, dim=-1))
    model.unload()
    return sequences


@pytest.mark.parametrize(("count", "tokens"), [(2, 12), pytest.param(len(PROMPTS), 50, marks=pytest.mark.slow)])
def test_greedy_text_equals_that_of_transformers(smollm2: Path, count: int, tokens: int) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    equal = 0
    prompts = PROMPTS[:count]
    for prompt, ids in zip(prompts, sequences(smollm2, prompts, tokens), strict=True):
        answer = ids[0, -tokens:]
        with torch.inference_mode():
            logits = reference(ids).logits[0, -tokens - 1 : -1]
        chosen = logits.gather(-1, answer.unsqueeze(-1))[:, 0]
        behind = (logits.amax(-1) - chosen).max().item()
        print(f"{prompt!r}: at most {behind:.4f} behind the best")
        assert behind < 0.05, prompt  # fp16 may decide a tie otherwise
        equal += behind == 0.0
    assert equal >= count - 1
