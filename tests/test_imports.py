"""Who may import what (docs: imports point down, one importer of the engine, no torch in the server process)."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import start

ROOT = Path(start.__file__).parent
LAYERS = ("common", "backends", "endpoints", "main")  # each imports only itself and what stands before it
CODE = [*LAYERS, "start", "tools", "scripts"]
ENGINE = "backends/exllamav3/engine.py"
KERNELS = "backends/exllamav3/cpu/"
WEB_FRAMEWORK = {"fastapi", "starlette", "sse_starlette", "uvicorn"}
# Each takes memory and time of every start, for what few servers are asked to do, or another process does.
RARELY_NEEDED = {"PIL", "httpx", "huggingface_hub", "matplotlib", "rich"}
ENGINES = {"exllamav3", "exllamav3_ext", "sentence_transformers", "torch"}
# Names of the standard library that Windows lacks, as the documentation marks them.
POSIX_MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
POSIX_NAMES = {
    "asyncio": {"add_signal_handler"},
    "os": {"fchown", "chown", "fork", "forkpty", "geteuid", "getuid", "getpgid", "killpg", "mkfifo", "nice", "openpty"}
    | {"register_at_fork", "sched_getaffinity", "sched_setaffinity", "setpgid", "setpriority", "setsid", "setuid"}
    | {"WNOHANG", "kill", "posix_spawn", "umask", "uname", "waitid"},
    "signal": {"SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGQUIT", "SIGUSR1", "SIGUSR2", "alarm", "pthread_kill"}
    | {"setitimer", "sigwait"},
}
POSIX_ALLOWED = {"common/open_files.py"}


@cache
def sources() -> dict[str, ast.Module]:
    """Every source file of the product, by its path within the project."""
    paths = [path for name in CODE for path in [ROOT / f"{name}.py", *(ROOT / name).rglob("*.py")] if path.is_file()]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def imported_modules(tree: ast.Module) -> Iterator[str]:
    """Full names, those in functions included and those for type checkers left out.

    `from a import b` gives both `a` and `a.b`, which may be a module.
    """
    only_types = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for child in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if node in only_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def top_level(modules: Iterator[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def files_of(module: str) -> set[str]:
    """The project's files that importing `module` runs: itself and the packages around it."""
    parts = module.split(".")
    stems = ["/".join(parts[: count + 1]) for count in range(len(parts))]
    return {name for stem in stems for name in (f"{stem}.py", f"{stem}/__init__.py") if name in sources()}


def reachable(start_module: str) -> set[str]:
    """The project's files that end up imported once `start_module` is."""
    reached: set[str] = set()
    pending = files_of(start_module)
    while pending:
        name = pending.pop()
        reached.add(name)
        for module in imported_modules(sources()[name]):
            pending |= files_of(module) - reached
    return reached


def test_imports_point_down() -> None:
    for name, tree in sources().items():
        layer = name.removesuffix(".py").partition("/")[0]
        allowed = set(LAYERS[: LAYERS.index(layer) + 1]) if layer in LAYERS else set(CODE)
        assert top_level(imported_modules(tree)).intersection(CODE) <= allowed, name


def test_common_knows_neither_engines_nor_the_web_framework() -> None:
    for name, tree in sources().items():
        if name.startswith("common/"):
            assert not top_level(imported_modules(tree)) & (ENGINES | WEB_FRAMEWORK), name


def test_exllamav3_has_one_importer() -> None:
    importers = {name for name, tree in sources().items() if "exllamav3" in top_level(imported_modules(tree))}
    assert ENGINE in importers
    assert {name for name in importers if not name.startswith(KERNELS)} == {ENGINE}


def test_the_cuda_path_does_not_depend_on_the_cpu_kernels() -> None:
    """Only engine.py knows them, and it imports them where it has found no GPU."""
    package = KERNELS.rstrip("/").replace("/", ".")
    for name, tree in sources().items():
        if not name.startswith(KERNELS) and name != ENGINE:
            assert not any(module.startswith(package) for module in imported_modules(tree)), name
    imports = [node for node in sources()[ENGINE].body if isinstance(node, ast.Import | ast.ImportFrom)]
    unconditional = imported_modules(ast.Module(list[ast.stmt](imports), type_ignores=[]))
    assert not any(module.startswith(package) for module in unconditional)


def test_no_file_of_the_server_process_imports_an_engine() -> None:
    files = reachable("main")
    assert {"main.py", "endpoints/server.py", "backends/manager.py", "common/config_models.py"} <= files
    for name in files:
        assert not top_level(imported_modules(sources()[name])) & ENGINES, name


def test_the_server_process_loads_no_engine_and_nothing_for_rare_occasions() -> None:
    unwanted = ENGINES | RARELY_NEEDED
    check = f"import sys, main, endpoints.server; print(sorted({unwanted!r} & sys.modules.keys()))"
    answer = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (answer.stdout, answer.returncode) == ("[]\n", 0), answer.stderr


def test_every_imported_package_is_declared() -> None:
    declared = {normal(name_of(requirement)) for requirement in start.declared_requirements(["embeddings", "plots"])}
    distributions = packages_distributions()
    for name, tree in sources().items():
        foreign = top_level(imported_modules(tree)) - sys.stdlib_module_names - set(CODE) - {"exllamav3_ext"}
        for package in foreign:
            providers = {normal(distribution) for distribution in distributions[package]}
            assert providers & declared, f"{name} imports {package}"


def name_of(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None
    return found[0]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("name", sorted(sources()))
def test_nothing_needs_posix(name: str) -> None:
    if name in POSIX_ALLOWED:
        return
    tree = sources()[name]
    assert not top_level(imported_modules(tree)) & POSIX_MODULES
    used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= set(imported_modules(tree))
    assert not used & {f"{module}.{name}" for module, names in POSIX_NAMES.items() for name in names}
    assert not any(call.endswith(".add_signal_handler") for call in used)
