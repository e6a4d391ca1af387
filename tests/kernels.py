"""Builds the CUDA kernels, and checks what the server embeds.

    python tests/kernels.py build    # writes server/kernels/src/cuda/kernels.ptx
    python tests/kernels.py check    # compares it, and examines the instructions

It needs the packages of tests/python/requirements-cuda.txt, and no GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CUDA = Path(__file__).parents[1] / "server" / "kernels" / "src" / "cuda"
SOURCES = CUDA / "kernels"
PTX = CUDA / "kernels.ptx"
#: The oldest GPUs that are supported; the driver compiles the PTX for later ones.
ARCHITECTURE = "compute_80"
#: The GPUs for which the PTX is assembled.
ASSEMBLED = ("sm_80", "sm_90")
OPTIONS = (
    f"--gpu-architecture={ARCHITECTURE}",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--restrict",
)


def packages() -> Path:
    """The folder with the packages of NVIDIA."""
    import nvidia

    return Path(next(iter(nvidia.__path__)))


class Nvrtc:
    """NVIDIA's compiler."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(packages() / "cuda_nvrtc" / "lib" / "libnvrtc.so.12"))

    def _text(self, name: str, program: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        getattr(self._library, f"nvrtcGet{name}Size")(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        getattr(self._library, f"nvrtcGet{name}")(program, text)
        return text.value.decode()

    def compile(self, sources: Path) -> str:
        """The PTX of all source files of a folder."""
        program = ctypes.c_void_p()
        create = self._library.nvrtcCreateProgram
        included = "".join(f'#include "{file.name}"\n' for file in sorted(sources.glob("*.cu")))
        created = create(ctypes.byref(program), included.encode(), b"all.cu", 0, None, None)
        if created:
            sys.exit(f"nvrtcCreateProgram: error {created}")
        options = [*(option.encode() for option in OPTIONS), f"-I{sources}".encode()]
        array = (ctypes.c_char_p * len(options))(*options)
        failed = self._library.nvrtcCompileProgram(program, len(options), array)
        log = self._text("ProgramLog", program).strip()
        if log:
            print(log, file=sys.stderr)
        if failed:
            sys.exit(f"{sources} does not compile")
        return self._text("PTX", program)


def check_instructions(ptx: str) -> None:
    """Fails on an operation that might be contracted, or rounds in another way than the CPU."""
    for line in ptx.splitlines():
        found = re.search(
            r"\b(add|sub|mul|div|sqrt|fma|mad|rcp|rsqrt)\.([\w.]*\.)?f(32|64)\b", line
        )
        if found and not re.fullmatch(r"(add|sub|mul|div|sqrt)\.rn\.f(32|64)", found[0]):
            sys.exit(f"a kernel has {line.strip()!r}")


def assemble(ptx: Path, architecture: str) -> dict[str, int]:
    """Assembles the PTX. Returns the number of registers of each kernel."""
    ptxas = packages() / "cuda_nvcc" / "bin" / "ptxas"
    with tempfile.NamedTemporaryFile() as binary:
        command = [ptxas, "-v", f"-arch={architecture}", ptx, "-o", binary.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"ptxas for {architecture}: {done.stderr}")
    registers = {}
    kernel = ""
    for line in done.stderr.splitlines():
        if named := re.search(r"Function properties for (\w+)", line):
            kernel = named[1]
        if spilled := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", line):
            if int(spilled[1]) or int(spilled[2]):
                sys.exit(f"{kernel} spills on {architecture}: {line.strip()}")
        if used := re.search(r"Used (\d+) registers", line):
            registers[kernel] = int(used[1])
    return registers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["build", "check"])
    command = parser.parse_args().command
    ptx = Nvrtc().compile(SOURCES)
    if command == "build":
        PTX.write_text(ptx)
    elif PTX.read_text() != ptx:
        sys.exit(f"{PTX} is not what its sources give; run `python tests/kernels.py build`")
    check_instructions(ptx)
    registers = {architecture: assemble(PTX, architecture) for architecture in ASSEMBLED}
    print(f"{'kernel':28}" + "".join(f"{architecture:>8}" for architecture in ASSEMBLED))
    for name in sorted(registers[ASSEMBLED[0]]):
        print(f"{name:28}" + "".join(f"{of[name]:8}" for of in registers.values()))


if __name__ == "__main__":
    main()
