"""Test suites that nobody here wrote: fetched from their packages, run against our server, judged by an allow-list.

A suite's test does four things:

1. `PackageCache` fetches the package and makes an environment for it (one a suite: they pin old clients).
2. `served` of tests/serving.py starts our server with what the suite expects.
3. `run_pytest`, or another runner, turns the suite's run into `Results`.
4. `AllowList.judge` compares them with the suite's list of expected failures, a TOML file beside the test:

       [[expected]]
       reason = "asserts the text of its own model"
       tests = [
           "unit/test_a.py::test_one",             # an id
           "unit/test_a.py::test_two[*",           # every id that begins so
       ]
       may_pass = true                             # only where the outcome depends on what the model happens to say

A run fails on a failure that is not on the list, and on an entry that is out of date: one that matches no test that has
failed or (without `may_pass`) one that has passed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from xml.etree import ElementTree

import pytest
from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field

from tests.serving import ServerProcess

FETCH_SECONDS = 900
# What the run of our own tests must not hand down to that of another suite.
OWN_VARIABLES = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTHONPATH", "PYTHONWARNINGS", "PYTHONHOME")


class SuiteError(Exception):
    """A suite could not be fetched or run; nothing is said about our server."""


# --- packages and environments ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackageCache:
    """Unpacked packages and environments, each made once and kept between runs.

    All of its methods return what is there already when they have been called with the same arguments before, and raise
    SuiteError with the output of pip or npm when something cannot be had. The registries are those of the machine's own
    configuration.

    Attributes:
        folder: where everything is kept, outside of git.
    """

    folder: Path

    def environment(self, name: str, *requirements: str | Path) -> Path:
        """Make a virtual environment.

        Args:
            name: what it is for.
            requirements: packages as one gives them to pip; a path is that of a requirements file.

        Returns:
            Its Python.
        """

        def make(folder: Path) -> None:
            venv.create(folder, with_pip=bool(requirements))
            arguments: list[str | Path] = []
            for item in requirements:
                arguments += ["-r", item] if isinstance(item, Path) else [item]
            if arguments:
                _run([_python(folder), "-m", "pip", "install", "--disable-pip-version-check", *arguments])

        inputs = [item.read_text(encoding="utf-8") if isinstance(item, Path) else item for item in requirements]
        return _python(self._once(f"env-{name}", [sys.version, *inputs], make))

    def sdist(self, requirement: str, python: Path, variables: Mapping[str, str] | None = None) -> Path:
        """Fetch and unpack the source distribution of a package on PyPI.

        Args:
            requirement: "name==version".
            python: Python of an environment that holds what the package's build needs: pip asks it for the metadata.
            variables: environment variables that the build reads.

        Returns:
            The folder with the package's pyproject.toml.
        """
        name = requirement.partition("==")[0]
        options = ["--no-binary", name, "--no-deps", "--no-build-isolation"]

        def make(folder: Path) -> None:
            _pip_download(python, requirement, folder, options, variables)
            _unpack(_only(folder, "*.tar.gz"))

        return _only(self._once(f"sdist-{name}", [requirement, variables], make), "*/")

    def wheel(self, requirement: str, python: Path, members: Sequence[str]) -> Path:
        """Fetch a wheel from PyPI and unpack parts of it.

        Args:
            requirement: "name==version".
            python: Python of an environment with pip.
            members: beginnings of the paths within the wheel.

        Returns:
            The folder with these parts, for an import path.
        """

        def make(folder: Path) -> None:
            _pip_download(python, requirement, folder, ["--only-binary", ":all:", "--no-deps"])
            path = _only(folder, "*.whl")
            with zipfile.ZipFile(path) as archive:
                archive.extractall(folder, [name for name in archive.namelist() if name.startswith(tuple(members))])
            path.unlink()

        return self._once(f"wheel-{requirement.partition('==')[0]}", [requirement, *members], make)

    def npm(self, requirement: str) -> Path:
        """Fetch and unpack a package of the npm registry, "name@version". Returns the folder with its package.json."""
        npm = shutil.which("npm")
        if npm is None:
            raise SuiteError("npm is not installed")

        def make(folder: Path) -> None:
            _run([npm, "pack", requirement, "--silent"], folder=folder)
            _unpack(_only(folder, "*.tgz"))

        name = requirement.rpartition("@")[0].strip("@").replace("/", "-")
        return self._once(f"npm-{name}", [requirement], make) / "package"

    def npm_programs(self, *requirements: str) -> Path:
        """Install packages of the npm registry, "name@version", with all they depend on. Returns the folder of their
        programs."""
        npm = shutil.which("npm")
        if npm is None:
            raise SuiteError("npm is not installed")

        def make(folder: Path) -> None:
            _run([npm, "init", "--yes"], folder=folder)
            _run([npm, "install", "--no-audit", "--no-fund", *requirements], folder=folder)

        name = requirements[0].rpartition("@")[0].strip("@").replace("/", "-")
        return self._once(f"npm-{name}", list(requirements), make) / "node_modules" / ".bin"

    def _once(self, name: str, inputs: object, make: Callable[[Path], None]) -> Path:
        """The folder that `make` fills, made anew when the inputs change or when it was not finished."""
        key = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:12]
        folder = self.folder / f"{name}-{key}"
        finished = self.folder / f"{name}-{key}.finished"
        with FileLock(self.folder / f"{name}-{key}.lock"):  # suites run side by side
            if not finished.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                finished.touch()
        return folder


def _python(environment: Path) -> Path:
    return environment / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def _unpack(path: Path) -> None:
    """Put what an archive holds in its place."""
    with tarfile.open(path) as archive:
        if hasattr(tarfile, "data_filter"):  # not before Python 3.11.4
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(path.parent)
    path.unlink()


def _only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def _pip_download(
    python: Path, requirement: str, folder: Path, options: Sequence[str], variables: Mapping[str, str] | None = None
) -> None:
    download: list[str | Path] = [python, "-m", "pip", "download", "--disable-pip-version-check"]
    _run([*download, *options, "--dest", folder, requirement], variables=variables)


def _run(
    command: Sequence[str | Path], *, folder: Path | None = None, variables: Mapping[str, str] | None = None
) -> None:
    run = run_command(command, folder=folder, variables=variables, timeout=FETCH_SECONDS)
    if run.returncode != 0:
        raise SuiteError(f"{' '.join(map(str, command))} ended with status {run.returncode}:\n{run.stdout[-4000:]}")


# --- running a suite --------------------------------------------------------------------------------------------------


def set_defaults(server: ServerProcess, *, force: bool = False, **values: float) -> None:
    """Give the server's sampling parameters other defaults, as a suite's own server has them from its command line.

    Args:
        server: it runs.
        force: use them whatever a request says.
        values: by the parameter's name.
    """
    with server.client(server.admin_key) as client:
        overrides = {name: {"override": value, "force": force} for name, value in values.items()}
        client.post("/v1/sampling/override/switch", json={"overrides": overrides}).raise_for_status()


def call(name: str, **arguments: object) -> str:
    """A call as most models write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass(frozen=True)
class Outcome:
    """What became of one test of a suite."""

    status: Literal["passed", "failed", "skipped"]
    message: str = ""  # the first line of what a failure says


Results = dict[str, Outcome]  # by the test's id


def run_command(
    command: Sequence[str | Path],
    *,
    folder: Path | None = None,
    variables: Mapping[str, str] | None = None,
    timeout: float,
) -> subprocess.CompletedProcess[str]:
    """Run a program with this process's environment (less what concerns our own tests) and `variables`.

    Returns:
        Its exit status, and in `stdout` all that it has written.

    Raises:
        SuiteError: it ran for longer than `timeout` seconds and was stopped.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES}
    try:
        return subprocess.run(
            list(map(str, command)),
            cwd=folder,
            env=inherited | dict(variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as error:
        output = error.output.decode(errors="replace") if isinstance(error.output, bytes) else error.output or ""
        raise SuiteError(f"{command[0]} ran for more than {timeout} s:\n{output[-4000:]}") from error


def run_pytest(
    python: Path,
    folder: Path,
    *arguments: str,
    report: Path,
    timeout: float,
    variables: Mapping[str, str] | None = None,
) -> Results:
    """Run a suite that is written for pytest, in its own environment and with its own settings.

    Args:
        python: Python of the suite's environment.
        folder: working directory and root of the suite; it gets an empty pytest.ini if it has none, so that ours is not
            found.
        arguments: files, markers, options.
        report: where to write the JUnit report, in an existing folder.
        timeout: seconds for all of it.
        variables: environment variables for the suite.

    Returns:
        Results by node id, such as "unit/test_a.py::TestB::test_c[d]", with the path relative to `folder`.

    Raises:
        SuiteError: pytest could not run or collect all of it, or took too long.
    """
    folder = folder.resolve()  # pytest's ids are relative to that
    settings = folder / "pytest.ini"
    if not settings.exists():
        settings.write_text("[pytest]\n", encoding="utf-8")
    options: list[str | Path] = ["-c", settings, "--rootdir", folder, "-p", "no:cacheprovider", "-q", "--tb=short"]
    options += ["-o", "junit_family=xunit1", "--junit-xml", report]  # of this family because it names the file
    run = run_command(
        [python, "-m", "pytest", *options, *arguments], folder=folder, variables=variables, timeout=timeout
    )
    if run.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SuiteError(f"pytest ended with status {run.returncode}:\n{run.stdout[-8000:]}")
    return read_junit(report)


def read_junit(report: Path) -> Results:
    """Read pytest's JUnit report of the family xunit1."""
    results: Results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file, name, dotted = case.get("file", ""), case.get("name", ""), case.get("classname", "")
        module = file.removesuffix(".py").replace("\\", "/").replace("/", ".")
        classes = dotted.removeprefix(module).strip(".").replace(".", "::")
        test = "::".join(part for part in (file.replace("\\", "/"), classes, name) if part)
        outcome = Outcome("passed")
        for child in case:
            if child.tag in ("failure", "error"):
                outcome = Outcome("failed", child.get("message", "").partition("\n")[0])
            elif child.tag == "skipped":
                outcome = Outcome("skipped")
        # A test whose teardown fails as well is there twice.
        if test not in results or outcome.status == "failed":
            results[test] = outcome
    return results


# --- judging it -------------------------------------------------------------------------------------------------------


class ExpectedFailures(BaseModel):
    """Tests of a suite that fail for one reason."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reason: Annotated[str, Field(min_length=10)]
    tests: Annotated[list[str], Field(min_length=1)]  # ids; a "*" at the end stands for any rest
    may_pass: bool = False  # the outcome depends on what the model happens to say


class AllowList(BaseModel):
    """The expected failures of one suite."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    expected: list[ExpectedFailures] = []

    @classmethod
    def read(cls, path: Path) -> AllowList:
        return cls.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))

    def judge(self, results: Results) -> None:
        """Fail the test that runs, with every complaint, if the results are not as the list says."""
        complaints = self.complaints(results)
        if complaints:
            pytest.fail("\n".join(complaints), pytrace=False)

    def complaints(self, results: Results) -> list[str]:
        """What is wrong, a line each, and a summary last; nothing if all is as expected."""
        failed = {test: outcome for test, outcome in results.items() if outcome.status == "failed"}
        passed = {test for test, outcome in results.items() if outcome.status == "passed"}
        expected: set[str] = set()
        stale = []
        for entry in self.expected:
            for pattern in entry.tests:
                failing, passing = matching(pattern, failed), matching(pattern, passed)
                expected |= set(failing)
                if passing and not entry.may_pass:
                    stale += [f"PASSES, but {pattern!r} expects a failure: {test}" for test in passing]
                elif not failing and not passing:
                    stale.append(f"NOT RUN: no test matches {pattern!r}, or only skipped ones")
        unexpected = [f"FAILS: {test}: {failed[test].message}" for test in failed if test not in expected]
        summary = f"{len(passed)} passed, {len(failed)} failed, {len(expected)} of those as expected"
        return [*unexpected, *stale, summary] if unexpected or stale else []


def matching(pattern: str, tests: Collection[str]) -> list[str]:
    """The ids that a pattern stands for. Only a "*" at its end is special: ids are full of brackets."""
    if pattern.endswith("*"):
        return sorted(test for test in tests if test.startswith(pattern[:-1]))
    return [pattern] if pattern in tests else []
