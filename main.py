"""Waypoint: `python main.py` serves; `python main.py --help` lists settings and sub-commands."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from loguru import logger

from backends.exllamav3.checkpoint_target import in_seconds
from backends.exllamav3.checkpoints import plan_for
from backends.exllamav3.plan_report import describe_plan, describe_without_checkpoints, draw_plan
from backends.manager import ModelManager
from common.args import PlanArguments, parse_arguments
from common.auth import KeyStore
from common.config_models import Settings
from common.download_messages import DownloadRequest
from common.downloader import Downloads, download_folders
from common.errors import InvalidRequest, ModelNotFound, NotFound, ServerError, SettingsError
from common.logger import setup_logging
from common.sampling import SamplerPresets
from common.tabby_config import LoadedSettings, generate_config_file, load_settings, merge_load_settings
from endpoints.core.types.cache import CachePlan
from endpoints.errors import to_server_error
from endpoints.server import create_app, serve
from endpoints.state import application_state, check_load

EXIT_FAILED = 1
# As of programs that do not understand their command line.
EXIT_SETTINGS = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = parse_arguments(argv)
    try:
        if arguments.command == "export-config":
            with writing(arguments.export_path):
                generate_config_file(filename=arguments.export_path)
            return 0
        loaded = load_settings(arguments.options, config_file=arguments.config_file)
        if arguments.command == "export-openapi":
            with writing(arguments.export_path):
                export_openapi(loaded.settings, Path(arguments.export_path))
            return 0
        log_settings: dict[str, object] = {}
        if arguments.command != "serve":
            log_settings["log_file"] = False
        if arguments.command == "download":  # which says with a bar how it gets on
            log_settings["log_level"] = "WARNING"
        setup_logging(loaded.settings.logging.model_copy(update=log_settings))
        for warning in loaded.warnings:
            logger.warning("{}", warning)
        if arguments.plan is not None:
            print(plan_checkpoints(loaded, arguments.plan))
            return 0
        if arguments.download is not None:
            return download(loaded.settings, arguments.download)
        asyncio.run(run_server(loaded))
    except (SettingsError, ServerError) as error:
        print(error, file=sys.stderr)
        return EXIT_SETTINGS
    except KeyboardInterrupt:  # uvicorn has shut down in order, and passes Ctrl-C on
        return EXIT_INTERRUPTED
    finally:
        forget_lost_console()
    return 0


def forget_lost_console() -> None:
    """Python exits with 120 where stderr cannot be written to any more, though the server has ended in order."""
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except OSError:
        sys.stderr = None


@contextlib.contextmanager
def writing(path: str, option: str = "--export-path") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}. Give another file with {option}.") from error


def export_openapi(settings: Settings, path: Path) -> None:
    app = create_app(settings, ModelManager(Path(settings.model.model_dir)), keys=None)
    path.write_text(json.dumps(app.openapi(), indent=2) + "\n", encoding="utf-8")


def plan_checkpoints(loaded: LoadedSettings, asked: PlanArguments) -> str:
    """What `plan` prints. Raises `ServerError` and `SettingsError`."""
    manager = new_manager(loaded.settings)
    directory = find_model(manager, asked.model or loaded.settings.model.model_name)
    load = merge_load_settings(loaded.settings, model_directory=directory, command_line=loaded.command_line)
    basis = asyncio.run(manager.plan_basis(directory, load))
    model = directory.name
    if basis is None:
        if asked.plot is not None:
            logger.warning("{} is not written: there are no checkpoints to draw.", asked.plot)
        report = CachePlan(model=model, recurrent=False, prompt_tokens=asked.prompt_tokens)
        return report.model_dump_json(indent=2) if asked.as_json else describe_without_checkpoints(model)
    target = load.model.recurrent_checkpoint_target
    if target is not None and in_seconds(target):
        logger.warning("recurrent_checkpoint_target is {}: without the speed of a loaded model it is left out.", target)
    plan = plan_for(basis, asked.prompt_tokens, boundaries=asked.boundaries)
    if asked.plot is not None:
        with writing(asked.plot, "--plot"):
            Path(asked.plot).write_bytes(draw_plan(model, plan))
    if asked.as_json:
        return CachePlan.of(model, plan).model_dump_json(indent=2)
    return describe_plan(model, basis, plan, asked.boundaries)


def new_manager(settings: Settings) -> ModelManager:
    model = settings.model
    return ModelManager(Path(model.model_dir), selection=model, engine_timeout=settings.network.engine_timeout)


def find_model(manager: ModelManager, name: str | None) -> Path:
    """Folder of a model of model_dir, or at a path. Raises `ModelNotFound`."""
    if not name:
        raise SettingsError("Which model? Give one with --model, or set model.model_name.")
    for folder in (manager.model_dir / name, Path(name)):
        if (folder / "config.json").is_file():
            return folder.absolute()
    raise ModelNotFound(f"There is no model {name!r}, neither in {manager.model_dir} nor at that path.")


def download(settings: Settings, asked: DownloadRequest) -> int:
    """What `download` does; the exit status. The new folder is printed, the progress is shown on stderr."""
    try:
        print(asyncio.run(show_download(settings, asked)))
    except (InvalidRequest, NotFound) as error:
        print(error, file=sys.stderr)
        return EXIT_SETTINGS
    except ServerError as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("Interrupted. What has come is kept; the same command goes on from there.", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


async def show_download(settings: Settings, asked: DownloadRequest) -> Path:
    """Download with a progress bar. Raises `ServerError`."""
    # Imported here: it takes 3 MB, for which a server has no use.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    downloads = Downloads(download_folders(settings))
    running = await downloads.start(asked)
    try:
        with Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True)) as shown:
            bar = shown.add_task(asked.repo_id, total=None)
            async for progress in running.follow():
                shown.update(bar, completed=progress.bytes, total=progress.total or None, description=progress.phase)
        return await running.result()
    finally:
        await downloads.close()


async def run_server(loaded: LoadedSettings) -> None:
    """Serve until told to stop; the start-up model loads meanwhile."""
    settings = loaded.settings
    keys = None if settings.network.disable_auth else KeyStore.open()
    if keys is None:
        logger.warning("network.disable_auth is set: everybody who reaches this server is its administrator.")
    manager = new_manager(settings)
    presets = SamplerPresets()
    app = create_app(settings, manager, keys, presets)
    background = [
        asyncio.create_task(load_at_start(loaded, manager, presets)),
        asyncio.create_task(application_state(app).embeddings.load_at_start()),
    ]
    if keys is not None:
        background.append(asyncio.create_task(keys.watch()))
    try:
        await serve(app, settings, manager)
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)


async def load_at_start(loaded: LoadedSettings, manager: ModelManager, presets: SamplerPresets) -> None:
    """Load `model.model_name`. A failure is reported, by the log and by /ready; the server goes on without a model."""
    name = loaded.settings.model.model_name
    if not name:
        logger.info("No model.model_name is set; a model can be loaded with POST /v1/model/load.")
        return
    try:
        directory = manager.resolve(name)
        load = merge_load_settings(loaded.settings, model_directory=directory, command_line=loaded.command_line)
        await check_load(directory, load, presets)
        async for progress in manager.load(directory, load):
            logger.debug("Loading {}: {} {}/{}", name, progress.component, progress.module, progress.modules)
    except Exception as error:
        failure = to_server_error(error)
        manager.load_error = failure.message
        logger.error("The model {} was not loaded: {}", name, failure.message)
    else:
        logger.success("The model {} is ready.", name)


if __name__ == "__main__":
    sys.exit(main())
