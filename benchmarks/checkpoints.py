"""What an edit of a prompt costs on a hybrid model, and what its checkpoints cost, on the real engine.

    python -m benchmarks.checkpoints [--quick] [--pairs 9]

Two models with random weights are made in a temporary folder: the tiny hybrid of the tests, and one of the same kind
with 16 layers. All counts of tokens are exact, and the same on every machine and for every size of model. Seconds are
CPU time where there is no GPU, since other programs run on the machine too. OMP_NUM_THREADS sets the threads.

--quick leaves out the larger model and most repetitions.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import torch
from loguru import logger
from rich.console import Console
from rich.table import Table

from backends.exllamav3.checkpoints import DEFAULT_INTERVAL, DEFAULT_INTERVAL_PP, plan
from backends.exllamav3.engine import DEVICE, ENGINE_VERSION
from backends.exllamav3.model import ExllamaV3Container
from common.caching import CheckpointsState
from common.config_models import PAGE_TOKENS, DraftModelConfig, LoadSettings, MemoryConfig, ModelConfig
from common.generation import Finish, GenerationRequest, Prefill, TextDelta, Usage
from common.parsing.detection import detect
from common.sampling import SamplingParameters
from common.templating import find_template
from endpoints.OAI.types.chat import ChatCompletionRequest
from endpoints.OAI.utils.chat import ChatTurn
from endpoints.OAI.utils.prompt import PromptWriter
from tests.models import corpus, make_deep_hybrid, make_hybrid

# The reference experiment: a prompt of this length, and one token changed at each of these positions.
PROMPT_TOKENS = 5266
EDITS = (276, 1321, 2024, 2639, 3769, 4373)
ROWS = (  # chunk_size, recurrent_checkpoint_interval_pp, recurrent_checkpoint_interval
    (1024, DEFAULT_INTERVAL_PP, DEFAULT_INTERVAL),
    (1024, 2048, DEFAULT_INTERVAL),
    (1024, 1024, DEFAULT_INTERVAL),
    (1024, 1024, 1024),
    (2048, DEFAULT_INTERVAL_PP, DEFAULT_INTERVAL),
    (512, 512, 512),
    (256, 256, 256),
)
FEW_ROWS = (ROWS[3],)

CHAT_TOKENS = 5000
SYSTEM_TOKENS = 1500
CALLS = 30
ANSWER_TOKENS = 40
CACHE_TOKENS = 32768

Messages: TypeAlias = list[dict[str, Any]]
clock = time.perf_counter if DEVICE == "cuda" else time.process_time


# --- a loaded model -------------------------------------------------------------------------------------------------


class Served(NamedTuple):
    """
    Attributes:
        passes: of the model over parts of the prompt.
        tokens: in these passes; the last one of a prompt is never among them.
        answer: ids of its tokens.
    """

    usage: Usage
    passes: int
    tokens: int
    seconds: float
    answer: list[int]


class Engine:
    """A loaded model, with the passes that it makes counted."""

    def __init__(self, container: ExllamaV3Container) -> None:
        self.container = container
        self._passes: list[int] = []
        prefill = container.model.prefill

        def counted(input_ids: torch.Tensor, params: dict[str, Any]) -> Any:
            self._passes.append(input_ids.shape[-1])
            return prefill(input_ids=input_ids, params=params)

        container.model.prefill = counted
        template = find_template(container.directory)
        assert template is not None
        model, control_tokens = container.settings.model, container.encoder.control_tokens
        syntax = detect(template, [token.text for token in control_tokens], model)
        self._writer = PromptWriter(template, model, control_tokens, syntax=syntax, has_checkpoints=True)

    async def serve(self, request: GenerationRequest) -> Served:
        self._passes.clear()
        answer: list[int] = []
        started = clock()
        async for event in self.container.start(request).events():
            if isinstance(event, TextDelta):
                answer += event.token_ids
            if isinstance(event, Finish):
                return Served(event.usage, len(self._passes), sum(self._passes), clock() - started, answer)
        raise AssertionError("an answer without an end")

    async def cancel(self, request: GenerationRequest, done_tokens: int) -> int:
        """Give a request up as soon as so much of its prompt is processed; returns how much is."""
        job = self.container.start(request)
        async for event in job.events():
            if isinstance(event, Prefill) and event.done_tokens >= done_tokens:
                await job.cancel()
                return event.done_tokens
        raise AssertionError("the prompt was not that long")

    def chat(self, messages: Messages) -> GenerationRequest:
        """What the server makes of a chat completion that asks for one token."""
        body = {"messages": messages, "max_tokens": 1, "temperature": 0}
        (request,) = ChatTurn(ChatCompletionRequest.model_validate(body), self._writer).requests()
        return request

    def tokens(self, request: GenerationRequest) -> list[int]:
        if not isinstance(request.prompt, str):
            return request.prompt
        return self.container.encode(
            request.prompt, add_bos=request.add_bos, encode_special_tokens=True, literals=request.literals
        )

    def checkpoints(self) -> CheckpointsState:
        state = self.container.cache_state().checkpoints
        assert state is not None
        return state

    def positions(self) -> list[int]:
        """Of the checkpoints held, ascending."""
        return sorted(entry.position for entry in self.checkpoints().entries)


@asynccontextmanager
async def loaded(
    directory: Path, model: Mapping[str, object], memory: Mapping[str, object] | None = None
) -> AsyncIterator[Engine]:
    """A model with settings of these sections."""
    settings = LoadSettings(
        model=ModelConfig.model_validate({"cache_size": CACHE_TOKENS, "max_seq_len": CACHE_TOKENS, **model}),
        draft_model=DraftModelConfig(),
        memory=MemoryConfig.model_validate(memory or {}),
    )
    container = ExllamaV3Container.create(directory, settings)
    for _ in container.load():
        pass
    await container.create_generator()
    try:
        yield Engine(container)
    finally:
        await container.unload()


def request_of(prompt: str | list[int], boundaries: Sequence[int] = (), max_tokens: int = 1) -> GenerationRequest:
    return GenerationRequest(
        prompt=prompt,
        sampling=SamplingParameters(temperature=0.0),
        add_bos=False,
        max_tokens=max_tokens,
        cache_boundaries=list(boundaries),
    )


def random_prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 1000) for _ in range(length)]


# --- chats ----------------------------------------------------------------------------------------------------------


class Writer:
    """Gives another text each time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lines = corpus()

    def text(self, tokens: int) -> str:
        """Whole lines, of at least so many tokens."""
        text = ""
        while len(self._engine.tokens(request_of(text))) < tokens:
            text += next(self._lines)
        return text


def long_chat(engine: Engine) -> Messages:
    """A system prompt, eight turns of both sides, and a question at the end: about 5,000 tokens."""
    writer = Writer(engine)
    messages: Messages = [{"role": "system", "content": writer.text(1100)}]
    for _ in range(8):
        messages.append({"role": "user", "content": writer.text(140)})
        messages.append({"role": "assistant", "content": writer.text(270)})
    return [*messages, {"role": "user", "content": writer.text(300)}]


def with_edit(messages: Messages, index: int) -> Messages:
    """The chat with a word put at the beginning of one message."""
    message = messages[index]
    return [*messages[:index], {**message, "content": "Edited: " + message["content"]}, *messages[index + 1 :]]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    return next(index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)


def floor(prompt_tokens: int, edit: int) -> int:
    """The least that can be processed after an edit: everything from the page on that it is in."""
    return prompt_tokens - 1 - edit // PAGE_TOKENS * PAGE_TOKENS


def spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    return f"{show(median(values))} ({show(min(values))} - {show(max(values))})"


# --- what is measured -----------------------------------------------------------------------------------------------


async def replay_table(directory: Path, rows: Sequence[tuple[int, int, int]]) -> Table:
    prompt = random_prompt(0, PROMPT_TOKENS)
    table = Table(
        "chunk, pp, interval",
        "checkpoints at",
        "same again",
        *(f"@{edit}" for edit in EDITS),
        title=f"Tokens processed again in a prompt of {PROMPT_TOKENS:,}: measured (planned)",
    )
    for chunk_size, interval_pp, interval in rows:
        computed = plan(
            PROMPT_TOKENS, chunk_size, interval, interval_pp, checkpoint_bytes=1, budget_bytes=PROMPT_TOKENS
        )
        intervals = {"recurrent_checkpoint_interval": interval, "recurrent_checkpoint_interval_pp": interval_pp}
        async with loaded(directory, {"chunk_size": chunk_size, **intervals}) as engine:
            await engine.serve(request_of(prompt))
            marks = engine.positions()
            cells = []
            for edit in (PROMPT_TOKENS, *EDITS):
                other = [token + (index == edit) for index, token in enumerate(prompt)]
                cells.append(f"{(await engine.serve(request_of(other))).tokens} ({computed.replay(edit)})")
        shown = f"{len(marks)} ({len(computed.marks)}): {', '.join(map(str, marks[:5]))}{' …' * (len(marks) > 5)}"
        table.add_row(f"{chunk_size}, {interval_pp}, {interval}", shown, *cells)
    return table


NO_BOUNDARIES = {"recurrent_checkpoint_boundaries": 0}
DENSE = {"chunk_size": 1024, "recurrent_checkpoint_interval": 1024, "recurrent_checkpoint_interval_pp": 1024}
CHOICES: Mapping[str, Mapping[str, int]] = {
    "the engine's defaults": NO_BOUNDARIES,
    "1024 and 1024, chunk 1024": {**NO_BOUNDARIES, **DENSE},
    "boundaries (the default)": {},
    "boundaries, 1024 and 1024, chunk 1024": DENSE,
}
PLACES = {"the last user turn": -1, "a turn in the middle": 7, "the first user turn": 1}  # index of the message


async def edit_table(directory: Path) -> Table:
    """Edits of a chat where it has boundaries, and one where it has none."""
    table = Table("Settings", "checkpoints held")
    for name, settings in CHOICES.items():
        cells, floors = [], []
        async with loaded(directory, settings) as engine:
            messages = long_chat(engine)
            request = engine.chat(messages)
            prompt = engine.tokens(request)
            await engine.serve(request)
            held = engine.positions()
            for index in PLACES.values():
                edited = engine.chat(with_edit(messages, index % len(messages)))
                ids = engine.tokens(edited)
                edit = first_difference(prompt, ids)
                cells.append(f"{(await engine.serve(edited)).tokens}")
                floors.append((f"@{edit}", f"{floor(len(ids), edit)}"))
        if not table.title:
            table.title = f"Tokens processed again after an edit of a chat of {len(prompt):,} tokens"
            for place, (position, _) in zip(PLACES, floors, strict=True):
                table.add_column(f"{place}, {position}", justify="right")
        table.add_row(name, f"{len(held)}: {', '.join(map(str, held))}", *cells)
    table.add_row("floor", "", *(least for _, least in floors))
    return table


async def cold_table(directory: Path, pairs: int) -> Table:
    """Prompts that are not cached, with boundaries and without, in turns; each another one."""
    boundaries = (1100, 4200, 4700)
    found: dict[bool, list[Served]] = {False: [], True: []}
    async with loaded(directory, {}) as engine:
        await engine.serve(request_of(random_prompt(0, CHAT_TOKENS)))  # warms up
        for number in range(pairs):
            for bounded in (number % 2 == 0, number % 2 != 0):
                prompt = random_prompt(2 * number + bounded + 1, CHAT_TOKENS)
                found[bounded].append(await engine.serve(request_of(prompt, boundaries if bounded else ())))
    table = Table(
        "Boundaries at",
        "passes",
        "tokens",
        "seconds",
        "times as long",
        title=f"A prompt of {CHAT_TOKENS:,} tokens that is not cached, {pairs} pairs",
    )
    ratios = [one.seconds / other.seconds for one, other in zip(found[True], found[False], strict=True)]
    for bounded, served in found.items():
        ((passes, tokens),) = {(one.passes, one.tokens) for one in served}
        table.add_row(
            ", ".join(map(str, boundaries)) if bounded else "none",
            f"{passes}",
            f"{tokens}",
            spread([one.seconds for one in served], "{:.2f}".format),
            spread(ratios, "{:.3f}".format) if bounded else "1",
        )
    return table


async def loop_table(directory: Path, calls: int) -> Table:
    """A loop of tool calls that makes more checkpoints than fit, then a new chat with the same system prompt."""
    table = Table(
        "Settings",
        "checkpoints: fit, made",
        "replayed a call",
        "processed a call",
        f"cached in a new chat, of {SYSTEM_TOKENS:,}",
        title=f"A loop of {calls} tool calls with answers of {ANSWER_TOKENS} tokens, 1 MB for checkpoints",
    )
    for name, boundaries in (("the engine's defaults", ()), ("boundaries (the default)", (SYSTEM_TOKENS,))):
        async with loaded(directory, {"recurrent_dtype": "fp32"}, {"sysmem_recurrent_cache": 1}) as engine:
            system = random_prompt(0, SYSTEM_TOKENS)
            prompt = [*system, *random_prompt(1, 100)]
            usages = []
            for number in range(calls):
                served = await engine.serve(request_of(prompt, boundaries, ANSWER_TOKENS))
                usages.append(served.usage)
                prompt += [*served.answer, *random_prompt(number + 2, 180)]
            state = engine.checkpoints()
            other = await engine.serve(request_of([*system, *random_prompt(calls + 2, 100)], boundaries))
        table.add_row(
            name,
            f"{state.capacity}, {len(state.entries) + state.evictions + state.pruned}",
            spread([usage.matched_tokens - usage.cached_tokens for usage in usages[1:]], "{:.0f}".format),
            spread([usage.prompt_tokens - 1 - usage.cached_tokens for usage in usages[1:]], "{:.0f}".format),
            f"{other.usage.cached_tokens}",
        )
    return table


async def restart_table(directory: Path, folder: Path) -> Table:
    """The same prompt before and after the model was loaded anew, with the disk tier and without."""
    table = Table(
        "Disk tier",
        "first",
        "again",
        "from disk",
        "seconds",
        "again",
        title="Tokens processed, before and after a restart",
    )
    prompt = request_of(random_prompt(0, CHAT_TOKENS), (1100, 4200, 4700))
    for name, memory in (("none", {}), ("disk_cache_dir", {"disk_cache_dir": str(folder)})):
        async with loaded(directory, {}, memory) as engine:
            first = await engine.serve(prompt)
        async with loaded(directory, {}, memory) as engine:
            await engine.serve(request_of(random_prompt(1, 300)))  # warms up
            again = await engine.serve(prompt)
        seconds = [f"{one.seconds:.2f}" for one in (first, again)]
        table.add_row(name, f"{first.tokens}", f"{again.tokens}", f"{again.usage.disk_tokens}", *seconds)
    return table


async def cancel_table(directory: Path) -> Table:
    """Prompts that are given up on the way, and asked for again."""
    table = Table(
        "chunk_size", "given up at", "goes on from", "processed", title=f"A prompt of {CHAT_TOKENS:,} tokens, cancelled"
    )
    for chunk_size, given_up in ((2048, 2048), (512, 2500), (256, 4000)):
        async with loaded(directory, {"chunk_size": chunk_size}) as engine:
            prompt = request_of(random_prompt(0, CHAT_TOKENS))
            done = await engine.cancel(prompt, given_up)
            again = await engine.serve(prompt)
        table.add_row(f"{chunk_size}", f"{done}", f"{again.usage.cached_tokens}", f"{again.tokens}")
    return table


# --- all of it ------------------------------------------------------------------------------------------------------


async def measure(console: Console, folder: Path, pairs: int, quick: bool) -> None:
    makers = {"tiny hybrid, 4 layers": make_hybrid, "hybrid, 16 layers": make_deep_hybrid}
    for number, (name, make) in enumerate(makers.items()):
        if number and quick:
            continue
        directory = make(folder / f"model-{number}")
        console.rule(name)
        console.print(await replay_table(directory, FEW_ROWS if quick or number else ROWS))
        console.print(await edit_table(directory))
        console.print(await cold_table(directory, pairs))
        console.print(await loop_table(directory, CALLS))
        console.print(await restart_table(directory, folder / f"disk-{number}"))
        console.print(await cancel_table(directory))


def main() -> None:
    options = argparse.ArgumentParser(description="Measure what edits and checkpoints of hybrid models cost.")
    options.add_argument("--pairs", type=int, help="pairs of prompts that are timed (default: 9, with --quick 3)")
    options.add_argument("--quick", action="store_true", help="the tiny model only, with few repetitions")
    arguments = options.parse_args()
    logger.remove()
    console = Console(width=max(150, Console().width))
    instructions = torch.backends.cpu.get_cpu_capability()
    threads = torch.get_num_threads()
    console.print(f"exllamav3 {ENGINE_VERSION} on {DEVICE}; CPU instructions {instructions}, {threads} threads")
    started = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        pairs = arguments.pairs or (3 if arguments.quick else 9)
        asyncio.run(measure(console, Path(folder), pairs, arguments.quick))
    wall, cpu = time.perf_counter() - started[0], time.process_time() - started[1]
    console.print(f"{wall:.0f} s in all, {cpu:.0f} s of CPU time")


if __name__ == "__main__":
    main()
