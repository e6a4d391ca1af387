"""The command ``zeroshard``, also ``python -m zeroshard``."""

from __future__ import annotations

import argparse
import os
import sys

from . import _launch
from ._environment import check
from ._native import __version__
from ._programs import program
from .errors import UnavailableError

#: The commands that are those of zsctl.
OF_ZSCTL = {
    "plan": "compute the memory and the traffic of a job before it is created",
    "doctor": "check the connections from this machine to every server of a cluster",
}


def main() -> int:
    """Runs the command line. Returns the exit code: 1 for an error, 2 for invalid flags; otherwise
    that of the command."""
    parser = argparse.ArgumentParser(
        prog="zeroshard",
        description="Start a cluster on this machine, plan clusters, and check this environment.",
        epilog="`zsctl` shows and manages running clusters.",
    )
    parser.add_argument("--version", action="version", version=f"zeroshard {__version__}")
    commands = parser.add_subparsers(dest="command_name", metavar="COMMAND", required=True)
    _launch.add_arguments(commands.add_parser("launch", help="start a cluster on this machine"))
    commands.add_parser("check", help="print what ZeroShard can do in this environment")
    for name, summary in OF_ZSCTL.items():
        commands.add_parser(name, help=summary, add_help=False)
    options, rest = parser.parse_known_args()
    try:
        if options.command_name in OF_ZSCTL:
            zsctl = program("zsctl")
            os.execv(zsctl, [zsctl, options.command_name, *rest])
        if rest:
            parser.error(f"unknown arguments: {' '.join(rest)}")
        if options.command_name == "check":
            found = check()
            print(found)
            return 0 if found.ok else 1
        return _launch.run(options)
    except UnavailableError as error:
        print(f"zeroshard: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
