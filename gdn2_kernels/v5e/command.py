"""`python -m gdn2_kernels v5e module.py:function ..`: compile, count, print."""

import argparse
import ast
import importlib.util
import os
import pathlib
import sys

from gdn2_kernels.v5e.compile import CompileError, Unavailable, compile
from gdn2_kernels.v5e.tables import compare

DESCRIPTION = """
Cycles, bytes and units of functions on a TPU v5e, by its compiler; no TPU is needed.
FILE.py:FUNCTION names a function without required arguments that returns (fn, args):
what to compile, and arrays or shapes to compile it for. FILE.py:FUNCTION(H=4) passes
keywords. With several, ratios to the first are printed as well.
"""


def load(spec: str):
    """Returns: fn, args of "file.py:function" or "file.py:function(name=literal)".

    Raises: ValueError: no such file or function, or it returns something else.
    """
    path, _, call = spec.partition(":")
    name, _, keywords = call.partition("(")
    path = pathlib.Path(path)
    if not path.is_file() or not name:
        raise ValueError(
            f"spec: expected FILE.py:FUNCTION of a file that exists, got {spec!r}"
        )
    found = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(found)
    sys.path.insert(0, str(path.parent))
    sys.modules.setdefault(path.stem, module)
    found.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"spec: expected a function of {path}, got {name!r}")
    options = {}
    if keywords:
        parsed = ast.parse(f"f({keywords}", mode="eval").body
        options = {x.arg: ast.literal_eval(x.value) for x in parsed.keywords}
    result = function(**options)
    if not (isinstance(result, tuple) and len(result) == 2 and callable(result[0])):
        raise ValueError(
            f"{spec}: expected it to return (fn, args), got {type(result).__name__}"
        )
    return result


def main(arguments):
    parser = argparse.ArgumentParser(
        "python -m gdn2_kernels v5e", description=DESCRIPTION
    )
    parser.add_argument("spec", nargs="+", metavar="FILE.py:FUNCTION")
    parser.add_argument(
        "--json", type=pathlib.Path, help="write the report (of one) here"
    )
    parser.add_argument("--plot", type=pathlib.Path, help="draw the last report, a PNG")
    parser.add_argument("--topology", default="v5e:1x1")
    parser.add_argument("--timeout", type=float, default=600, help="seconds")
    parser.add_argument("--dumps", help="keep what the compiler writes in this folder")
    parser.add_argument("--no-cache", action="store_true", help="compile again")
    options = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is run: leave a TPU alone
    reports = []
    for spec in options.spec:
        try:
            fn, args = load(spec)
            report = compile(
                fn, *args, topology=options.topology, cache=not options.no_cache,
                timeout=options.timeout, dumps=options.dumps,
            )  # fmt: skip
        except (CompileError, Unavailable, ValueError) as error:
            print(f"{spec}: {error}", file=sys.stderr)
            return 1
        reports.append(report)
        print(f"{spec}\n{report}\n")
    if len(reports) > 1:
        print(compare(*reports, names=[spec.rsplit("/")[-1] for spec in options.spec]))
    if options.json:
        options.json.write_text(reports[-1].to_json() + "\n")
    if options.plot:
        reports[-1].plot().savefig(options.plot, dpi=120)
    return 0
