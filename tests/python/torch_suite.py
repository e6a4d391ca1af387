"""Runs PyTorch's own tests of tensor parallelism with torch's functions and with ZeroShard's.

The tests are three files of PyTorch's sources, of the version that is installed:

    git clone --depth 1 --branch v2.15.0 https://github.com/pytorch/pytorch DIR
    pip install numpy expecttest hypothesis    # into the environment that has torch and zeroshard
    python tests/python/torch_suite.py --source DIR

Each file runs twice. The second time, the functions and classes of zeroshard.torch.parallel stand
in the place of those that a test file imports from torch.distributed.tensor.parallel, and of those
that the model of the tests uses. The table has a row for each file: the number of tests, and how
many of them passed with each library. Tests that pass with torch and do not pass with ZeroShard
are listed below it with the first line of the error.

A test has four ranks, which are processes on CPUs and communicate over gloo. The run differs from
a run of the files themselves:

- Tests that require GPUs run as well. Attention is computed as matrix products, since DTensor does
  not support torch's attention kernel for CPUs.
- Ranks are forked from a process that has imported the test file, which saves seconds for each.
- Tests that simulate all ranks in one process (LocalTensorMode) are left out.
- A test that takes too long is killed, and counts as failed.
- With --any-message, the types of expected errors are compared, but not their messages.

The exit status is 0 if ZeroShard passes all tests that torch passes, and 1 if it does not. With
--against torch or --against zeroshard it is 1 if a test does not pass. It is 2 if the tests cannot
be run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import multiprocessing
import os
import signal
import sys
import traceback
import unittest
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path("test/distributed/tensor/parallel")
FILES = ("test_tp_style", "test_parallelize_api", "test_tp_examples")
LIBRARIES = ("torch", "zeroshard")

#: The modules of torch from which the tests, and the model of the tests, take the styles.
PARALLEL = "torch.distributed.tensor.parallel"
COMMON = "torch.testing._internal.distributed._tensor.common_dtensor"
MODULES = (PARALLEL, f"{PARALLEL}.api", f"{PARALLEL}.style", f"{PARALLEL}.loss", COMMON)

#: Seconds for importing torch and the test file.
IMPORT_TIMEOUT = 300.0
#: Seconds for torch to report a test that it has ended after ``--timeout``.
REPORT_TIMEOUT = 30.0

#: The reasons why tests have not passed, by name. None: the test has passed.
Outcomes = dict[str, str | None]

_context = multiprocessing.get_context("fork")


class CannotRun(Exception):
    """The tests cannot be run."""


# ---- the command


def main() -> int:
    """Runs the tests and prints the table. Returns the exit status."""
    options = parsed_arguments()
    libraries = LIBRARIES if options.against == "both" else (options.against,)
    rows = {}
    try:
        for file in FILES:
            if not (options.source / FOLDER / f"{file}.py").is_file():
                raise CannotRun(f"{options.source} has no file {FOLDER / file}.py")
            rows[file] = {library: outcomes_of(file, library, options) for library in libraries}
        if not any(row[libraries[0]] for row in rows.values()):
            raise CannotRun(f"no name of a test contains {options.k!r}")
    except CannotRun as error:
        print(f"torch_suite: {error}", file=sys.stderr)
        return 2
    return report(rows, libraries)


def parsed_arguments() -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--source", type=Path, required=True, metavar="DIR", help="PyTorch's sources")
    add("--against", choices=[*LIBRARIES, "both"], default="both", help="default: both")
    add("-k", default="", metavar="WORD", help="run only the tests whose names contain WORD")
    add("--timeout", type=int, default=120, metavar="S", help="seconds for a test (default: 120)")
    add("--any-message", action="store_true", help="do not compare the messages of errors")
    add("--verbose", action="store_true", help="show the output of the tests")
    return parser.parse_args()


def report(rows: dict[str, dict[str, Outcomes]], libraries: tuple[str, ...]) -> int:
    """Prints the table, and the tests that have not passed. Returns the exit status."""
    print("".join(["file".ljust(26), "tests".rjust(8), *(each.rjust(12) for each in libraries)]))
    for file, row in rows.items():
        passed = [list(row[library].values()).count(None) for library in libraries]
        print(
            f"{file + '.py':<26}{len(row[libraries[0]]):>8}" + "".join(f"{n:>12}" for n in passed)
        )
    status = 0
    for file, row in rows.items():
        for name in row[libraries[0]]:
            reasons = {library: row[library][name] for library in libraries if row[library][name]}
            # A test that torch does not pass either says nothing about ZeroShard.
            for library, reason in list(reasons.items())[:1]:
                status = status if library == "torch" and len(libraries) == 2 else 1
                print(f"\n{file}.py: {name}\n  not passed with {library}: {reason}")
    return status


# ---- the process of the command: starts a process for each file and library


def outcomes_of(file: str, library: str, options: argparse.Namespace) -> Outcomes:
    """Runs the tests of a file with a library."""
    outcomes: Outcomes = {}
    while True:
        with started(file, library, options, set(outcomes)) as results:
            names = received(results, IMPORT_TIMEOUT)
            if isinstance(names, str):
                raise CannotRun(f"{file}.py cannot be imported with {library}:\n{names}")
            for name in names:
                try:
                    outcomes[name] = received(results, options.timeout + REPORT_TIMEOUT)
                except CannotRun as error:
                    outcomes[name] = str(error)
                    break  # The other tests need a new process.
            else:
                return outcomes


@contextlib.contextmanager
def started(
    file: str, library: str, options: argparse.Namespace, done: set[str]
) -> Iterator[Connection]:
    """Starts a process that runs the tests that are not done. Kills it and its ranks at the end."""
    receiver, sender = _context.Pipe(duplex=False)
    process = _context.Process(target=run_tests, args=(file, library, options, done, sender))
    process.start()
    sender.close()
    try:
        yield receiver
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def received(results: Connection, timeout: float) -> Any:
    """The next message of a process."""
    if not results.poll(timeout):
        raise CannotRun(f"no result within {timeout:g} s")
    try:
        return results.recv()
    except EOFError:
        raise CannotRun("the process that runs the tests has ended") from None


# ---- the process of a file and a library: runs one test after the other


def run_tests(
    file: str, library: str, options: argparse.Namespace, done: set[str], results: Connection
) -> None:
    """Sends the names of the tests, or the error of the import, and then an outcome for each."""
    os.setsid()
    if not options.verbose:
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(null, stream.fileno())
    try:
        adapt_torch(options)
        if library == "zeroshard":
            replace_styles()
        sys.path.insert(0, str(options.source / FOLDER))
        tests = tests_of(importlib.import_module(file))
    except Exception:
        results.send(traceback.format_exc())
        return
    names = [name for name in tests if options.k in name and name not in done]
    results.send(names)
    for name in names:
        results.send(outcome_of(tests[name]))


def adapt_torch(options: argparse.Namespace) -> None:
    """Changes how torch runs tests: on CPUs only, in forked ranks."""
    # Without GPUs, the tests use gloo and four ranks. torch reads the variables on import.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(options.timeout)
    import torch
    from torch.testing._internal import common_device_type, common_distributed, common_utils

    torch.set_num_threads(1)  # in each rank
    torch.nn.functional.scaled_dot_product_attention = explicit_attention()
    common_distributed.MultiProcessTestCase._spawn_processes = lambda test: test._start_processes(
        _context.Process
    )
    common_distributed.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test
    importlib.import_module(COMMON).skip_unless_torch_gpu = lambda test: test
    # Some versions of the files make a class for each type of GPU, and none for CPUs.
    common_device_type.instantiate_device_type_tests = lambda tests, *_, **__: (
        common_utils.instantiate_parametrized_tests(tests)
    )
    if options.any_message:
        common_utils.TestCase.assertRaisesRegex = lambda test, error, _, *arguments, **named: (
            test.assertRaises(error, *arguments, **named)
        )


def explicit_attention() -> Callable[..., Any]:
    """torch's attention as matrix products."""
    from torch.distributed.tensor.experimental import implicit_replication
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def attention(*arguments: Any, **named: Any) -> Any:
        # The causal mask is a plain tensor, which is equal on all ranks.
        with sdpa_kernel(SDPBackend.MATH), implicit_replication():
            return scaled_dot_product_attention(*arguments, **named)

    return attention


def replace_styles() -> None:
    """Puts the functions and classes of ZeroShard in the place of torch's."""
    ours = importlib.import_module("zeroshard.torch.parallel")
    for module in map(importlib.import_module, MODULES):
        for name in set(ours.__all__) & set(vars(module)):
            setattr(module, name, getattr(ours, name))


def tests_of(module: ModuleType) -> dict[str, unittest.TestCase]:
    """The tests of a module, by name."""
    simulated = getattr(importlib.import_module(COMMON), "LocalDTensorTestBase", ())
    classes = [
        member
        for _, member in inspect.getmembers(module, inspect.isclass)
        if issubclass(member, unittest.TestCase) and not issubclass(member, simulated)
    ]
    return {
        f"{each.__name__}.{name}": each(name)
        for each in classes
        for name in unittest.TestLoader().getTestCaseNames(each)
    }


def outcome_of(test: unittest.TestCase) -> str | None:
    """Runs a test. Returns why it has not passed, or None."""
    result = unittest.TestResult()
    unittest.TestSuite([test]).run(result)
    problems = [first_line(text) for _, text in result.errors + result.failures]
    problems += [f"skipped: {reason}" for _, reason in result.skipped]
    return problems[0] if problems else None


def first_line(text: str) -> str:
    """The first line of the error in the last traceback of the first rank."""
    of_rank = text.split(" and exception:\n")[1:2] or [text]
    error = of_rank[0].rpartition("Traceback (most recent call last):")[2]
    return next((line for line in error.splitlines() if line and line[0] != " "), text)


if __name__ == "__main__":
    sys.exit(main())
