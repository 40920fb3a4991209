"""Runs of the tests: ``pip install nox``, then ``nox -l`` lists them and ``nox -s tests`` runs one."""

import re
import shutil

import nox

nox.options.sessions = ["tests", "lint"]
nox.options.reuse_existing_virtualenvs = True
nox.options.default_venv_backend = "venv"

# Environments that make torch's libraries take the kernels of other processors, and two threads instead of one.
PROCESSORS = {
    "oldest": {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "plain": {"ATEN_CPU_CAPABILITY": "default"},
    "threads": {"SEMDIAG_TEST_THREADS": "2"},
}


def _previous_torch(session: nox.Session) -> list[str]:
    """Return the last two minor versions of torch before the newest one, as pip finds them."""
    found = session.run("pip", "index", "versions", "torch", silent=True) or ""
    minors = list(dict.fromkeys(re.findall(r"\b(\d+\.\d+)\.\d+", found.partition("Available versions:")[2])))
    return minors[1:3]


@nox.session
def tests(session: nox.Session) -> None:
    """The default tests, with the newest versions of everything."""
    session.install("-e", ".[dev]")
    session.run("pytest", *session.posargs)


@nox.session(name="all")
def every_test(session: nox.Session) -> None:
    """Every case of every test with trained models, loggers and other random examples, and what they cover."""
    session.install("-e", ".[dev,test-hf,test-loggers]")
    env = {"SEMDIAG_EVERY_CASE": "1"}
    session.run("pytest", "-m", "", "--cov", "--hypothesis-profile=nightly", *session.posargs, env=env)
    session.run("coverage", "report", "--fail-under=91")  # paths of a GPU are not run there


@nox.session
def lint(session: nox.Session) -> None:
    """Style, types and layers."""
    session.install("-e", ".[dev]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("lint-imports")


@nox.session
def docs(session: nox.Session) -> None:
    """The examples of README and docs, run, and every link followed."""
    session.install("-e", ".[dev,test-hf]")
    files = ("tests/test_docs.py", "tests/test_notebook.py", "tests/test_own_model_guide.py")
    session.run("pytest", "-m", "", *files, *session.posargs)


@nox.session
def site(session: nox.Session) -> None:
    """The docs as a site, in site/."""
    session.install("-e", ".[docs]")
    session.run("mkdocs", "build", "--strict")


@nox.session
def lowest(session: nox.Session) -> None:
    """The default tests with the lowest versions that pyproject.toml allows."""
    session.install("-e", ".[dev]", "-c", ".ci/lowest.txt")
    session.run("pytest", *session.posargs)


@nox.session
def previous(session: nox.Session) -> None:
    """The default tests with the last two minor versions of torch before the newest."""
    session.install("-e", ".[dev]")
    for minor in _previous_torch(session):
        session.install(f"torch=={minor}.*")
        session.run("pytest", *session.posargs)


@nox.session
@nox.parametrize("processor", [nox.param(name, id=name) for name in PROCESSORS])
def processors(session: nox.Session, processor: str) -> None:
    """The tests that compare numbers, with the kernels of another processor."""
    session.install("-e", ".[dev]")
    session.run("pytest", "-m", "processor", *session.posargs, env=PROCESSORS[processor])


@nox.session
def gpu(session: nox.Session) -> None:
    """The tests of another device, on the GPU of this machine; without one, on a made-up device (needs g++)."""
    session.install("-e", ".[dev]")
    env = {} if shutil.which("nvidia-smi") else {"SEMDIAG_SECOND_DEVICE": "1"}
    session.run("pytest", "-n", "0", "-m", "device", *session.posargs, env=env)
