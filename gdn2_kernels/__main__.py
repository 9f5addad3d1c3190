"""`python -m gdn2_kernels COMMAND ..`: a table of commands, each imported when called."""

import importlib
import sys

# Command -> module with a function `main(arguments)`, and what it is for.
COMMANDS = {
    "v5e": (
        "gdn2_kernels.v5e.command",
        "cycles of a function on a TPU v5e, no TPU needed",
    ),
    "lab": ("gdn2_kernels.v5e.lab", "cycles of every stage, written to a results file"),
}


def main(arguments):
    name, *rest = arguments or ["--help"]
    if name in COMMANDS:
        return importlib.import_module(COMMANDS[name][0]).main(rest)
    lines = [f"  {command:8s} {what}" for command, (_, what) in COMMANDS.items()]
    print(
        "\n".join(
            ["usage: python -m gdn2_kernels COMMAND .. (--help says more)", *lines]
        )
    )
    return 0 if name in ("-h", "--help") else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
