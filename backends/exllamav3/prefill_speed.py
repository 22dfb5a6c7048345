"""How fast a loaded model reads a prompt."""

from __future__ import annotations

import random

from backends.exllamav3.engine import AsyncGenerator, AsyncJob, token_tensor

# A generation ends when so much is done: the first job pays for what kernels do once, the second is measured.
RUNS = 2


async def measure_prefill_speed(generator: AsyncGenerator, *, tokens: int, vocabulary: int) -> float:
    """Prompt tokens per second, of one chunk at the beginning of a prompt.

    Args:
        generator: with nothing else to do. Its caches are worth nothing afterwards.
        tokens: to read, at least 1; a chunk of the generator.
        vocabulary: token ids go from 0 to this less 1.
    """
    rng = random.Random(0)
    seconds = 0.0
    for _ in range(RUNS):
        # Random tokens, so that the second prompt is not found in the cache. The last one is not part of prefill.
        prompt = token_tensor([rng.randrange(vocabulary) for _ in range(tokens + 1)])
        async for result in AsyncJob(generator, prompt, max_new_tokens=1):
            if result["eos"]:
                seconds = result["time_prefill"]
    return tokens / seconds
