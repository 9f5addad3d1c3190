"""`python -m gdn2_kernels COMMAND ..`: a table of commands, each imported when called."""

import importlib
import sys

# Command -> module, the function of it that takes the words that follow, what it is for.
COMMANDS = {
    "v5e": ("v5e.command", "main", "cycles of a function on a TPU v5e, no TPU needed"),
    "lab": ("v5e.lab", "main", "cycles of every stage, written to a results file"),
    "audit": ("audit.command", "main", "what a stage computes, against every gate"),
    "bench": ("suites", "main", "times on the TPU at hand, written to a results file"),
    "export": ("export", "main", "a stage as one file that needs only JAX"),
    "train": ("train", "main", "a language model on text of your own"),
    "generate": ("train", "main_generate", "text from a trained model"),
}


def main(arguments):
    name, *rest = arguments or ["--help"]
    if name in COMMANDS:
        module, function, _ = COMMANDS[name]
        return getattr(importlib.import_module(f"gdn2_kernels.{module}"), function)(rest)
    print("usage: python -m gdn2_kernels COMMAND .. (--help says more)")
    for command, (_, _, what) in COMMANDS.items():
        print(f"  {command:10}{what}")
    return 0 if name in ("-h", "--help") else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
