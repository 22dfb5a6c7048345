"""Start clients and managers over the scripted worker, and read back what it was asked."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from backends.client import EngineClient, Generation
from backends.manager import ModelManager
from common.config_models import DraftModelConfig, LoadSettings, MemoryConfig, ModelConfig, ModelSelection
from common.generation import GenerationRequest, TextDelta
from common.sampling import SamplingParameters
from tests.scripted_worker import Script


def load_settings(**model: object) -> LoadSettings:
    return LoadSettings(model=ModelConfig.model_validate(model), draft_model=DraftModelConfig(), memory=MemoryConfig())


def ask(prompt: str = "hi", max_tokens: int = 0) -> GenerationRequest:
    return GenerationRequest(prompt=prompt, sampling=SamplingParameters(), max_tokens=max_tokens)


@asynccontextmanager
async def up(client: EngineClient) -> AsyncIterator[EngineClient]:
    """With its model loaded; closed in the end."""
    await client.prepare()
    async for _ in client.load():
        pass
    try:
        yield client
    finally:
        await client.close()


async def text_of(generation: Generation) -> str:
    return "".join([event.text async for event in generation if isinstance(event, TextDelta)])


async def say(client: EngineClient, prompt: str = "hi") -> str:
    """What the engine answers."""
    return await text_of(await client.generate(ask(prompt)))


@dataclass
class ScriptedEngine:
    """A script on disk, model folders that it answers for, and the command of its worker."""

    root: Path

    @property
    def script_path(self) -> Path:
        return self.root / "script.json"

    @property
    def model_dir(self) -> Path:
        return self.root / "models"

    @property
    def command(self) -> tuple[str, ...]:
        return (sys.executable, "-m", "tests.scripted_worker", str(self.script_path))

    def write(self, script: Script) -> None:
        """Takes effect for processes that start from now on."""
        self.script_path.write_bytes(msgspec.json.encode(script))

    def add_model(self, name: str) -> Path:
        directory = self.model_dir / name
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}", encoding="utf-8")
        return directory

    def history(self) -> list[GenerationRequest]:
        """Requests in the order in which they reached an engine."""
        path = self.script_path.with_name(self.script_path.name + ".history")
        lines = path.read_bytes().splitlines() if path.exists() else []
        return [msgspec.json.decode(line, type=GenerationRequest) for line in lines]

    def client(self, name: str = "alpha", *, engine_timeout: float = 0, **model: object) -> EngineClient:
        return EngineClient(self.model_dir / name, load_settings(**model), self.command, engine_timeout=engine_timeout)

    def manager(self, *, engine_timeout: float = 0, selection: ModelSelection | None = None) -> ModelManager:
        selection = selection or ModelSelection()
        return ModelManager(self.model_dir, self.command, selection=selection, engine_timeout=engine_timeout)


@asynccontextmanager
async def serving(engine: ScriptedEngine, script: Script) -> AsyncIterator[EngineClient]:
    engine.write(script)
    async with up(engine.client()) as client:
        yield client
