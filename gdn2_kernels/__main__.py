"""python -m gdn2_kernels COMMAND ..: a line for each, imported when asked for."""

import importlib
import sys

# name: (module with main(arguments) -> exit status, what it does)
COMMANDS = {
    "audit": (
        "gdn2_kernels.audit.command",
        "what a stage computes, against every gate",
    ),
}


def main(arguments):
    if not arguments or arguments[0] not in COMMANDS:
        print("python -m gdn2_kernels COMMAND [--help]\n")
        for name, (_, what) in COMMANDS.items():
            print(f"  {name:10}{what}")
        return 0 if arguments in ([], ["-h"], ["--help"]) else 2
    module, _ = COMMANDS[arguments[0]]
    return importlib.import_module(module).main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
