"""Commands: `python -m gdn2_kernels COMMAND ..`, each loaded only when asked for."""

import importlib
import sys

COMMANDS = {  # name: module, function of the words that follow
    "train": ("gdn2_kernels.train", "main"),
    "generate": ("gdn2_kernels.train", "main_generate"),
}


def main(words):
    if not words or words[0] not in COMMANDS:
        raise SystemExit(f"usage: python -m gdn2_kernels {{{','.join(COMMANDS)}}} ..")
    module, function = COMMANDS[words[0]]
    return getattr(importlib.import_module(module), function)(words[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
