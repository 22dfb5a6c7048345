"""Waypoint: `python main.py` serves; `python main.py --help` lists settings and sub-commands."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from loguru import logger

from backends.manager import ModelManager
from common.args import parse_arguments
from common.auth import KeyStore
from common.config_models import Settings
from common.errors import SettingsError
from common.logger import setup_logging
from common.sampling import SamplerPresets
from common.tabby_config import LoadedSettings, generate_config_file, load_settings, merge_load_settings
from endpoints.errors import to_server_error
from endpoints.server import create_app, serve
from endpoints.state import check_load

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
        setup_logging(loaded.settings.logging)
        for warning in loaded.warnings:
            logger.warning("{}", warning)
        asyncio.run(run_server(loaded))
    except SettingsError as error:
        print(error, file=sys.stderr)
        return EXIT_SETTINGS
    except KeyboardInterrupt:  # uvicorn has shut down in order, and passes Ctrl-C on
        return EXIT_INTERRUPTED
    return 0


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be written: {error.strerror}. Give another file with --export-path."
        ) from error


def export_openapi(settings: Settings, path: Path) -> None:
    app = create_app(settings, ModelManager(Path(settings.model.model_dir)), keys=None)
    path.write_text(json.dumps(app.openapi(), indent=2) + "\n", encoding="utf-8")


async def run_server(loaded: LoadedSettings) -> None:
    """Serve until told to stop; the start-up model loads meanwhile."""
    settings = loaded.settings
    keys = None if settings.network.disable_auth else KeyStore.open()
    if keys is None:
        logger.warning("network.disable_auth is set: everybody who reaches this server is its administrator.")
    manager = ModelManager(Path(settings.model.model_dir))
    presets = SamplerPresets()
    app = create_app(settings, manager, keys, presets)
    background = [asyncio.create_task(load_at_start(loaded, manager, presets))]
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
        check_load(directory, load, presets)
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
