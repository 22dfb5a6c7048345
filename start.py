"""One command from a fresh machine to a served model: environment, dependencies, demo model, server.

Uses the standard library only, and syntax that an old Python reads, so that it can say which Python is needed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
RECORD = VENV / "installation.json"
CONSTRAINTS = ROOT / "constraints.txt"
DEMO_MODEL = "SmolLM2-135M-Instruct"
SUBCOMMANDS = {"export-config", "export-openapi"}
EPILOG = """\
Every other argument goes to main.py (see `main.py --help`), which takes relative paths from this folder.
The choices made here are kept for later starts; --reinstall forgets them.
"""


@dataclass(frozen=True)
class Installation:
    """What `.venv` holds. Written into it, so that a later start knows whether anything is left to do."""

    flavour: str  # "cuda", or "cpu" with the versions of constraints.txt
    extras: list[str]  # optional dependency groups of pyproject.toml, sorted
    exllamav3_wheel: str | None
    torch_index_url: str | None
    inputs: str  # digest of the requirements and constraints; empty while pip has not finished


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - the one place that meets an older Python
        sys.exit(f"Waypoint needs Python 3.11 or later, and this is {sys.version.split()[0]}: install a newer one.")
    options, server_arguments = parse_arguments(sys.argv[1:])
    os.chdir(ROOT)
    installation = prepare(options)
    if options.install_only:
        return
    if installation.flavour == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    serve([*demo_arguments(server_arguments), *server_arguments])


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Splits the command line into the options of this script and the arguments of main.py."""
    parser = argparse.ArgumentParser(
        description="Set up .venv, fetch a demo model if no model is configured, and serve.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    option = parser.add_argument
    option("--cpu", action="store_true", help="use the CPU even where there is a GPU")
    option("--exllamav3-wheel", metavar="PATH_OR_URL", help="prebuilt wheel, instead of compiling the CUDA extension")
    option(
        "--torch-index-url", metavar="URL", help="take torch from this index; PyTorch has one per CUDA version and CPU"
    )
    option(
        "--extra", action="append", default=[], metavar="GROUP", help="add an optional group: embeddings, plots, test"
    )
    option("--install-only", action="store_true", help="set up the environment and stop")
    option("-fr", "--reinstall", "--force-reinstall", action="store_true", help="set up .venv from nothing")
    option("-ud", "--update-deps", action="store_true", help="update what is installed")
    # TabbyAPI's wrapper has these; its users' scripts go on working.
    foreign = [
        option("-ur", "--update-repository", action="store_true", help=argparse.SUPPRESS),
        option("-nw", "--nowheel", action="store_true", help=argparse.SUPPRESS),
        option("--gpu-lib", help=argparse.SUPPRESS),
    ]
    options, server_arguments = parser.parse_known_args(arguments)
    for action in foreign:
        if getattr(options, action.dest):
            say(f"{action.option_strings[-1]} has no effect here.")
    if options.exllamav3_wheel and "://" not in options.exllamav3_wheel:
        options.exllamav3_wheel = str(Path(options.exllamav3_wheel).resolve())
    return options, server_arguments


def prepare(options: argparse.Namespace) -> Installation:
    """Brings `.venv` to the state that the options and the project's files ask for; without pip if it is in it."""
    before = None if options.reinstall else recorded_installation()
    if options.cpu:
        flavour = "cpu"
    elif before:
        flavour = before.flavour
    else:
        flavour = detect_flavour()
    extras = sorted({*options.extra, *(before.extras if before else [])})
    requirements = declared_requirements(extras)
    wanted = Installation(
        flavour=flavour,
        extras=extras,
        exllamav3_wheel=options.exllamav3_wheel or (before.exllamav3_wheel if before else None),
        torch_index_url=options.torch_index_url or (before.torch_index_url if before else None),
        inputs=digest(requirements, flavour),
    )
    if wanted == before and not options.update_deps:
        return wanted
    announce(wanted)
    create_environment(anew=options.reinstall)
    record(replace(wanted, inputs=""))
    install(wanted, requirements, update=options.update_deps)
    record(wanted)
    return wanted


def recorded_installation() -> Installation | None:
    if not PYTHON.exists():
        return None
    try:
        return Installation(**json.loads(RECORD.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None  # no record, or not one of this version: pip sorts out what is there


def record(installation: Installation) -> None:
    RECORD.write_text(json.dumps(asdict(installation), indent=2) + "\n", encoding="utf-8")


def detect_flavour() -> str:
    gpus = list_gpus()
    for gpu in gpus:
        say(f"Found {gpu}")
    return "cuda" if gpus else "cpu"


def list_gpus() -> list[str]:
    """The GPUs as nvidia-smi names them; none where the driver is missing or does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    answer = subprocess.run([program, "-L"], capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        say(f"nvidia-smi failed, so no GPU is used: {(answer.stdout + answer.stderr).strip()}")
        return []
    return [line.partition(" (UUID")[0] for line in answer.stdout.splitlines() if line.startswith("GPU ")]


def declared_requirements(extras: list[str]) -> list[str]:
    import tomllib  # not in the Pythons that main() turns away

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = project["optional-dependencies"]
    for extra in extras:
        if extra not in groups:
            sys.exit(f"--extra {extra}: no such group; there are {', '.join(groups)}.")
    return [*project["dependencies"], *(requirement for extra in extras for requirement in groups[extra])]


def digest(requirements: list[str], flavour: str) -> str:
    content = "\n".join(requirements)
    if flavour == "cpu":
        content += CONSTRAINTS.read_text(encoding="utf-8")
    return hashlib.sha256(content.encode()).hexdigest()


def announce(installation: Installation) -> None:
    """Says what is about to be installed, and what the user may want to have done first."""
    index = installation.torch_index_url
    if installation.flavour == "cpu":
        say(f"Setting up {VENV} for the CPU; this takes minutes.")
        if sys.platform == "linux" and not index:
            say(
                "PyPI's torch for Linux comes with CUDA, gigabytes; --torch-index-url and PyTorch's CPU index avoid it."
            )
        return
    say(f"Setting up {VENV} for the GPU; this takes minutes. --cpu sets it up for the CPU instead.")
    if os.name == "nt" and not index:
        sys.exit("PyPI's torch for Windows has no CUDA: name PyTorch's index for your CUDA with --torch-index-url.")
    say(f"torch comes with CUDA from {index or 'PyPI'}.")
    if installation.exllamav3_wheel:
        say(f"exllamav3 comes from {installation.exllamav3_wheel}.")
        return
    say("exllamav3 comes from PyPI; its CUDA extension is compiled here, once.")
    if not (shutil.which("nvcc") or os.environ.get("CUDA_HOME")):
        say("WARNING: that needs the CUDA toolkit, and neither nvcc is on PATH nor CUDA_HOME set. Install the toolkit,")
        say("or give --exllamav3-wheel one of the prebuilt wheels on exllamav3's release page.")


def create_environment(*, anew: bool) -> None:
    """Makes `.venv`, unless it is there and its pip works (an interruption may have left it without)."""
    if not anew and PYTHON.exists() and run(PYTHON, "-m", "pip", "--version") == 0:
        return
    if run(sys.executable, "-m", "venv", "--clear", VENV) != 0:
        sys.exit(f"{VENV} could not be created. Debian and Ubuntu keep what it needs in the package python3-venv.")


def install(installation: Installation, requirements: list[str], *, update: bool) -> None:
    options = ["--upgrade"] if update else []
    if installation.flavour == "cpu":
        options += ["--constraint", str(CONSTRAINTS)]
    wheel = []
    if installation.exllamav3_wheel:
        wheel = [installation.exllamav3_wheel, *torch_of_wheel(installation.exllamav3_wheel)]
    if installation.torch_index_url:
        torch = [requirement for requirement in [*requirements, *wheel] if re.match(r"torch\W", requirement)]
        pip_install(*options, "--index-url", installation.torch_index_url, *torch)
    pip_install(*options, *requirements, *wheel)
    compile_packages()
    if installation.flavour == "cuda":
        try_engine()


def torch_of_wheel(wheel: str) -> list[str]:
    """The torch that a prebuilt wheel was compiled against, which only its name tells: `…+cu128.torch2.9.0-cp311-…`."""
    found = re.search(r"cu\d+\.torch(\d+\.\d+)", wheel)
    return [f"torch=={found[1]}.*"] if found else []


def pip_install(*arguments: str) -> None:
    status = run(PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile", *arguments)
    if status != 0:
        sys.exit(f"pip ended with status {status}, see above. The next start goes on where this one stopped.")


def compile_packages() -> None:
    """Writes the packages' bytecode on all cores; pip would take a minute or two for it on one.

    One package at a time: before Python 3.11.5, a pool of processes that gets some 16,000 files at once may wait for
    ever (https://github.com/python/cpython/issues/105829).
    """
    packages = [*VENV.glob("lib/python*/site-packages/*"), *VENV.glob("Lib/site-packages/*")]  # as Windows has it
    folders = [path for path in packages if path.is_dir()]
    run(PYTHON, "-m", "compileall", "-qq", "-j", "0", *folders)  # fails over files of packages that are no Python


def try_engine() -> None:
    """Imports the engine once, so that a long compilation, or its failure, is seen here and not at the first load."""
    say("Trying the engine on the GPU; where its extension must be compiled, this takes minutes.")
    if run(PYTHON, "-c", "import torch; torch.cuda.init(); import backends.exllamav3.engine") != 0:
        sys.exit(
            "exllamav3 does not run on this GPU, see above. Usual causes: the CUDA toolkit is missing or of another "
            "version than torch's (--exllamav3-wheel takes a prebuilt wheel instead); the driver is older than torch's "
            "CUDA (--torch-index-url takes torch from another index). --cpu serves without the GPU."
        )


def demo_arguments(server_arguments: list[str]) -> list[str]:
    """The arguments that serve the demo model, made first if need be; none if the user has configured anything."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--model-name", default=os.environ.get("TABBY_MODEL_MODEL_NAME"))
    parser.add_argument("--model-dir", default=os.environ.get("TABBY_MODEL_MODEL_DIR") or "models")
    named, _ = parser.parse_known_args(server_arguments)
    if named.config or named.model_name or Path("config.yml").exists() or SUBCOMMANDS.intersection(server_arguments):
        return []
    if not (Path(named.model_dir) / DEMO_MODEL).exists():
        say(f"No config.yml and no model named: fetching the demo model {DEMO_MODEL}.")
        if run(PYTHON, "tools/demo_model.py", "--models-dir", named.model_dir) != 0:
            sys.exit("Name a model of your own with --model-name, or write a config.yml (config_sample.yml shows how).")
    return ["--model-name", DEMO_MODEL]


def serve(arguments: list[str]) -> None:
    command = [str(PYTHON), "main.py", *arguments]
    sys.stdout.flush()
    if os.name != "nt":
        os.execv(command[0], command)  # the server gets this process, its signals and its exit status
    server = subprocess.Popen(command)
    while True:
        try:
            sys.exit(server.wait())
        except KeyboardInterrupt:
            continue  # the console sent it to the server too, which is shutting down


def run(*command: str | Path) -> int:
    return subprocess.run(command, check=False).returncode


def say(text: str) -> None:
    print(f"[start] {text}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Interrupted. The next start goes on where this one stopped.")
