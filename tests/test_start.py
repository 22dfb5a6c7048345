"""start.py with a project of its own (no network needed), and one run of ./start.sh with the real one."""

import ast
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from packaging.specifiers import SpecifierSet
from ruamel.yaml import YAML

import start
from backends.exllamav3.engine import ENGINE_REQUIREMENT
from tools import demo_model

ROOT = Path(start.__file__).parent
STARTUP_LIMIT = 240.0

posix_only = pytest.mark.skipif(os.name == "nt", reason="signals and shell scripts")

# Prints what it was given, then ends with status 7, or serves until a signal where it is told to.
MAIN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
print("ARGUMENTS", sys.argv[1:], "GPUS", repr(os.environ.get("CUDA_VISIBLE_DEVICES")), flush=True)
if "--serve" in sys.argv:
    time.sleep(60)
sys.exit(7)
"""
PYPROJECT = """
[project]
dependencies = ["pip"]
[project.optional-dependencies]
plots = ["pip>=1"]
"""


class Project:
    """A folder with start.py and stand-ins for the rest; `pip` is its only dependency, so nothing is downloaded."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root / "bin"

    @classmethod
    def create(cls, root: Path) -> "Project":
        shutil.copy(ROOT / "start.py", root)
        (root / "main.py").write_text(MAIN)
        (root / "pyproject.toml").write_text(PYPROJECT)
        (root / "constraints.txt").write_text("")
        (root / "bin").mkdir()
        project = cls(root)
        project.program("nvidia-smi", "exit 9")
        return project

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}", **environment}
        command = [sys.executable, "start.py", *arguments]
        return subprocess.run(command, cwd=self.root, env=variables, capture_output=True, text=True, check=False)

    def program(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def record(self) -> start.Installation:
        return start.Installation(**json.loads((self.root / ".venv" / "installation.json").read_text()))

    def break_pip(self) -> None:
        (package,) = self.root.glob(".venv/**/site-packages/pip")
        shutil.rmtree(package)


@pytest.fixture(scope="module")
def first_start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, subprocess.CompletedProcess[str]]:
    project = Project.create(tmp_path_factory.mktemp("project"))
    return project, project.run("--model-name", "m", "--port", "5001")


@pytest.fixture
def project(first_start: tuple[Project, subprocess.CompletedProcess[str]], tmp_path: Path) -> Project:
    """A project that has been started once."""
    shutil.copytree(first_start[0].root, tmp_path, symlinks=True, dirs_exist_ok=True)
    return Project(tmp_path)


@pytest.fixture
def new_project(project: Project) -> Project:
    """A project with an environment that nothing is known about, which saves the seconds that making one takes."""
    (project.root / ".venv" / "installation.json").unlink()
    return project


@posix_only
class TestEnvironment:
    def test_the_first_start_installs_and_serves(
        self, first_start: tuple[Project, subprocess.CompletedProcess[str]]
    ) -> None:
        _, answer = first_start
        assert "Setting up" in answer.stdout
        assert "Requirement already satisfied: pip" in answer.stdout
        assert answer.stdout.splitlines()[-1] == "ARGUMENTS ['--model-name', 'm', '--port', '5001'] GPUS ''"
        assert answer.returncode == 7

    def test_the_second_start_does_not_run_pip(self, project: Project) -> None:
        project.break_pip()
        answer = project.run("--model-name", "m")
        assert answer.stdout == "ARGUMENTS ['--model-name', 'm'] GPUS ''\n"
        assert answer.returncode == 7

    @pytest.mark.parametrize("pip_is_broken", [False, pytest.param(True, marks=pytest.mark.slow)])
    def test_an_interrupted_installation_is_finished_with_the_same_choices(
        self, new_project: Project, pip_is_broken: bool
    ) -> None:
        (new_project.root / "pyproject.toml").write_text(PYPROJECT.replace("pip>=1", "./absent"))
        failed = new_project.run("--install-only", "--extra", "plots")
        assert failed.returncode == 1
        assert "The next start goes on where this one stopped." in failed.stderr
        assert new_project.record().inputs == ""

        (new_project.root / "pyproject.toml").write_text(PYPROJECT)
        if pip_is_broken:
            new_project.break_pip()
        assert new_project.run("--install-only").returncode == 0
        assert new_project.record().extras == ["plots"]
        assert new_project.record().inputs != ""

    def test_changed_dependencies_and_an_added_group_are_installed(self, project: Project) -> None:
        before = project.record()
        assert "Setting up" in project.run("--install-only", "--extra", "plots").stdout
        assert project.record().extras == ["plots"]
        (project.root / "constraints.txt").write_text("pip>=1\n")
        assert "Setting up" in project.run("--install-only").stdout
        assert project.record().inputs != before.inputs
        assert project.run("--install-only").stdout == ""

    def test_the_server_gets_the_signals_of_the_start_script(self, project: Project) -> None:
        command = [sys.executable, "start.py", "--model-name", "m", "--serve"]
        with subprocess.Popen(command, cwd=project.root, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            assert server.stdout.readline().startswith("ARGUMENTS")
            server.send_signal(signal.SIGTERM)
            assert server.wait() == 9


@posix_only
class TestGPU:
    def test_a_gpu_is_announced_and_its_engine_tried(self, new_project: Project) -> None:
        new_project.program("nvidia-smi", "echo 'GPU 0: Some Card (UUID: GPU-1)'")
        answer = new_project.run("--install-only", PATH=str(new_project.bin), CUDA_HOME="")
        lines = answer.stdout.splitlines()
        assert lines[0] == "[start] Found GPU 0: Some Card"
        assert "for the GPU" in lines[1]
        assert any("torch comes with CUDA from PyPI" in line for line in lines)
        assert any("WARNING: that needs the CUDA toolkit" in line for line in lines)
        # There is no torch in this environment, so the trial must fail and say what to do.
        assert answer.returncode == 1
        assert "--exllamav3-wheel" in answer.stderr
        assert "--cpu" in answer.stderr
        assert new_project.record().flavour == "cuda"
        assert new_project.record().inputs == ""

    @pytest.mark.slow
    def test_a_reinstall_starts_from_nothing(self, new_project: Project) -> None:
        new_project.program("nvidia-smi", "echo 'GPU 0: Some Card (UUID: GPU-1)'")
        assert "for the CPU" in new_project.run("--install-only", "--cpu").stdout
        assert new_project.run("--install-only").stdout == ""
        assert "Found GPU 0" in new_project.run("--install-only", "--reinstall").stdout

    def test_a_driver_that_does_not_answer_means_cpu(self, new_project: Project) -> None:
        new_project.program("nvidia-smi", "echo 'driver mismatch'; exit 9")
        answer = new_project.run("--install-only")
        assert "nvidia-smi failed, so no GPU is used: driver mismatch" in answer.stdout
        assert new_project.record().flavour == "cpu"


class Pip:
    """Records what pip would be asked to install."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, ...]] = []
        monkeypatch.setattr(start, "pip_install", lambda *arguments: self.calls.append(arguments))
        monkeypatch.setattr(start, "compile_packages", lambda: None)
        monkeypatch.setattr(start, "try_engine", lambda: None)


def test_a_record_without_its_python_counts_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "PYTHON", tmp_path / "python")
    monkeypatch.setattr(start, "RECORD", tmp_path / "record.json")
    start.record(installation())
    assert start.recorded_installation() is None
    (tmp_path / "python").touch()
    assert start.recorded_installation() == installation()
    (tmp_path / "record.json").write_text('{"of": "another version"}')
    assert start.recorded_installation() is None


def test_the_flavour_is_kept_until_reinstall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(monkeypatch)
    monkeypatch.setattr(start, "PYTHON", tmp_path / "python")
    monkeypatch.setattr(start, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(start, "create_environment", lambda *, anew: start.PYTHON.touch())
    monkeypatch.setattr(start, "list_gpus", lambda: ["GPU 0: Some Card"])

    def prepared(*options: str) -> str:
        return start.prepare(start.parse_arguments([*options, "--install-only"])[0]).flavour

    assert [prepared("--cpu"), prepared()] == ["cpu", "cpu"]
    assert len(pip.calls) == 1
    assert prepared("--reinstall") == "cuda"
    assert len(pip.calls) == 2


@pytest.mark.parametrize(
    ("python", "pip_status", "anew", "made"),
    [(False, 0, False, True), (True, 0, False, False), (True, 1, False, True), (True, 0, True, True)],
    ids=["none", "complete", "without pip", "reinstall"],
)
def test_an_environment_is_made_where_none_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: bool, pip_status: int, anew: bool, made: bool
) -> None:
    monkeypatch.setattr(start, "PYTHON", tmp_path / "python")
    if python:
        start.PYTHON.touch()
    commands: list[tuple[str | Path, ...]] = []

    def run(*command: str | Path) -> int:
        commands.append(command)
        return pip_status if "pip" in command else 0

    monkeypatch.setattr(start, "run", run)
    start.create_environment(anew=anew)
    assert ((sys.executable, "-m", "venv", "--clear", start.VENV) in commands) == made


def installation(**changes: str) -> start.Installation:
    values: dict[str, str | None] = {"flavour": "cuda", "exllamav3_wheel": None, "torch_index_url": None, **changes}
    return start.Installation(
        flavour=values["flavour"] or "",
        extras=[],
        exllamav3_wheel=values["exllamav3_wheel"],
        torch_index_url=values["torch_index_url"],
        inputs="",
    )


REQUIREMENTS = ["exllamav3>=1", "torch>=2", "torchaudio>=2"]


def test_constraints_are_for_the_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(monkeypatch)
    start.install(installation(flavour="cpu"), REQUIREMENTS, update=False)
    start.install(installation(flavour="cuda"), REQUIREMENTS, update=True)
    assert pip.calls == [
        ("--constraint", str(start.CONSTRAINTS), *REQUIREMENTS),
        ("--upgrade", *REQUIREMENTS),
    ]


def test_torch_alone_comes_from_the_given_index(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(monkeypatch)
    start.install(installation(torch_index_url="http://127.0.0.1/cu130"), REQUIREMENTS, update=False)
    assert pip.calls == [("--index-url", "http://127.0.0.1/cu130", "torch>=2"), tuple(REQUIREMENTS)]


@pytest.mark.parametrize("plus", ["+", "%2B"])
def test_a_prebuilt_wheel_brings_the_torch_it_was_compiled_against(monkeypatch: pytest.MonkeyPatch, plus: str) -> None:
    pip = Pip(monkeypatch)
    wheel = f"/downloads/exllamav3-1.6.5{plus}cu128.torch2.9.0-cp311-cp311-linux_x86_64.whl"
    start.install(installation(exllamav3_wheel=wheel), REQUIREMENTS, update=False)
    assert pip.calls == [(*REQUIREMENTS, wheel, "torch==2.9.*")]


def test_every_dependency_is_declared_once() -> None:
    requirements = start.declared_requirements(["embeddings", "plots", "test"])
    names = [requirement.partition(">")[0] for requirement in requirements]
    assert len(set(names)) == len(names)
    (engine,) = (requirement for requirement in requirements if requirement.startswith("exllamav3>"))
    assert SpecifierSet(engine.removeprefix("exllamav3"), prereleases=True) == ENGINE_REQUIREMENT


def test_an_unknown_group_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match=r"--extra tests: no such group; there are embeddings, plots, test\."):
        start.declared_requirements(["tests"])


def test_other_options_pass_through_in_order() -> None:
    arguments = [
        "--cpu",
        "--gpu-split",
        "20",
        "24",
        "--cpu-moe-offload-layers",
        "2",
        "--config=a.yml",
        "--disable-auth",
        "true",
    ]
    options, rest = start.parse_arguments(arguments)
    assert options.cpu
    assert rest == arguments[1:]


def test_options_of_the_other_wrapper_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    options, rest = start.parse_arguments(["-fr", "-ud", "-ur", "-nw", "--gpu-lib", "cu12", "--port", "1"])
    assert options.reinstall
    assert options.update_deps
    assert rest == ["--port", "1"]
    assert capsys.readouterr().out.splitlines() == [
        "[start] --update-repository has no effect here.",
        "[start] --nowheel has no effect here.",
        "[start] --gpu-lib has no effect here.",
    ]


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TABBY_MODEL_MODEL_NAME", raising=False)
    monkeypatch.delenv("TABBY_MODEL_MODEL_DIR", raising=False)
    return tmp_path


def test_the_demo_model_is_made_once(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def run(*command: str | Path) -> int:
        commands.append([str(word) for word in command[1:]])
        (empty_folder / command[-1] / start.DEMO_MODEL).mkdir(parents=True)
        return 0

    monkeypatch.setattr(start, "run", run)
    for _ in range(2):
        assert start.demo_arguments(["--model-dir", "d"]) == ["--model-name", demo_model.MODEL_NAME]
    assert commands == [["tools/demo_model.py", "--models-dir", "d"]]


@pytest.mark.parametrize(
    "arguments",
    [["--model-name", "m"], ["--config", "c.yml"], ["--config=c.yml"], ["export-config"]],
)
def test_no_demo_model_where_something_is_asked_for(empty_folder: Path, arguments: list[str]) -> None:
    assert start.demo_arguments(arguments) == []


def test_no_demo_model_where_something_is_configured(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as environment:
        environment.setenv("TABBY_MODEL_MODEL_NAME", "m")
        assert start.demo_arguments([]) == []
    (empty_folder / "config.yml").touch()
    assert start.demo_arguments([]) == []


def test_a_failed_demo_model_names_the_way_out(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "run", lambda *command: 1)
    with pytest.raises(SystemExit, match="--model-name"):
        start.demo_arguments([])


def test_an_old_python_can_read_the_script_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ast.parse(Path(start.__file__).read_text(encoding="utf-8"), feature_version=(3, 8))
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    with pytest.raises(SystemExit, match=r"needs Python 3\.11 or later"):
        start.main()


def copy_tree(destination: Path) -> None:
    """The project as a fresh checkout has it, with this environment's packages."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (destination / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, destination / name)
    (destination / ".venv").symlink_to(ROOT / ".venv")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def served(tree: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    log = tree / "output.log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TABBY_")}
    with log.open("wb") as output:
        command = ["./start.sh", "--port", str(port)]
        server = subprocess.Popen(command, cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield server
    finally:
        server.kill()
        server.wait()
        print(log.read_text(encoding="utf-8", errors="replace"))


def wait_until_ready(client: httpx.Client, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + STARTUP_LIMIT
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server ended"
        try:
            if client.get("/ready").is_success:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(0.5)
    pytest.fail("the server did not become ready")


@pytest.mark.slow
@posix_only
@pytest.mark.skipif(not start.RECORD.exists(), reason="needs the environment that scripts/install makes")
def test_start_sh_serves_the_demo_model(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    port = free_port()
    with served(tmp_path, port) as server, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        wait_until_ready(client, server)
        keys = YAML(typ="safe").load(tmp_path / "api_tokens.yml")
        answer = client.post(
            "/v1/chat/completions",
            headers={"Authorization": f"Bearer {keys['api_key']}"},
            json={"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8, "temperature": 0},
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == demo_model.MODEL_NAME
        assert answer.json()["choices"][0]["message"]["content"].strip()
        server.send_signal(signal.SIGTERM)
        # uvicorn raises the signal again once it has shut down.
        assert server.wait(timeout=60) in (0, -signal.SIGTERM)
        assert "Application shutdown complete" in (tmp_path / "output.log").read_text(encoding="utf-8")
    assert keys["api_key"] not in "".join(path.read_text() for path in tmp_path.glob("logs/*.log"))
