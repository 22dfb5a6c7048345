"""The engine with nothing around it: what a server can reach at best.

Started by `benchmarks.serving`. The model is loaded as the server loads it; its jobs are the engine's own, with the
sampler that the server would choose.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from loguru import logger

from backends.exllamav3.engine import AsyncJob, CustomSampler, SS_Argmax
from backends.exllamav3.model import ExllamaV3Container
from benchmarks.drivers import Answer, Answers, Ask, Job, serve_jobs
from common.config_models import DraftModelConfig, LoadSettings, MemoryConfig, ModelConfig

# What tests/models/tokenizer.py's template makes of one message.
PROMPT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


class BareEngine:
    def __init__(self, container: ExllamaV3Container) -> None:
        self._container = container

    async def work(self, job: Job) -> Answers:
        assert isinstance(job, Ask)
        began, cpu = perf_counter(), process_time()
        asked = zip(job.prompts, job.max_tokens, job.starts, strict=True)
        answers = await asyncio.gather(*(self._answer(began, *one) for one in asked))
        return Answers(answers=answers, cpu=process_time() - cpu)

    async def _answer(self, began: float, prompt: str, max_tokens: int, start: float) -> Answer:
        if start:
            await asyncio.sleep(start)
        container, sent = self._container, perf_counter() - began
        ids = container.tokenizer.encode(PROMPT.format(prompt), add_bos=container.add_bos, encode_special_tokens=True)
        job = AsyncJob(
            container.generator,
            input_ids=ids,
            max_new_tokens=max_tokens,
            sampler=CustomSampler([SS_Argmax()]),
            stop_conditions=container.eos_token_ids,
            decode_special_tokens=True,
        )
        texts: list[float] = []
        result: dict[str, Any] = {}
        async for result in job:
            if result.get("text"):
                texts.append(perf_counter() - began)
        ended = perf_counter() - began
        return Answer(sent=sent, begun=sent, texts=texts, pings=[], ended=ended, tokens=result["new_tokens"])


async def main(directory: Path, model: dict[str, object]) -> None:
    settings = LoadSettings(
        model=ModelConfig.model_validate(model), draft_model=DraftModelConfig(), memory=MemoryConfig()
    )
    container = ExllamaV3Container.create(directory, settings)
    for _ in container.load():
        pass
    await container.create_generator()
    await serve_jobs(BareEngine(container).work)
    await container.unload()


if __name__ == "__main__":
    logger.remove()
    asyncio.run(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
