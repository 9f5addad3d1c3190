"""One stage as one file that imports nothing of this package.

    python -m gdn2_kernels export mxu -o gdn2_mxu.py

The modules behind a stage are laid end to end, what `gdn2` does not reach is left out,
and `tiles.weave` becomes `weave`. Text is otherwise left as it stands: names,
docstrings, comments. What the modules do at their top must be definitions, and calls
such as f.defvjp(..).
"""

import argparse
import ast
import importlib.util
import inspect
import re
from pathlib import Path

from gdn2_kernels import api, environment

PACKAGE = "gdn2_kernels"
HEADER = '''\
"""Gated DeltaNet-2 for TPU v5e in JAX, stage {stage!r}: one file, nothing but JAX needed.

    o, final_state = gdn2(q, k, v, g, b, w)

{what}

Written by gdn2-kernels {version} from its package, where every part is explained and
tested: {address}

Copyright the authors of gdn2-kernels. Licensed under the Apache License, Version 2.0:
https://www.apache.org/licenses/LICENSE-2.0
"""
'''
ADDRESS = "https://github.com/gdn2-kernels/gdn2-kernels"


class Definition:
    """A statement at the top of a module: what it defines, what it needs, its text."""

    def __init__(self, module, node, start, end):
        self.module, self.node, self.start, self.end = module, node, start, end
        self.names = _defined(node)
        self.local = set()
        # Names of a class body are not seen inside its functions.
        for part in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(part, ast.FunctionDef) or part is node:
                self.local |= _bound_in(part)
        self.local -= set(self.names)


class Module:
    """A module of the package, cut into definitions, and where its names come from."""

    def __init__(self, name):
        self.name = name
        source = inspect.getsource(importlib.import_module(name))
        self.lines = source.splitlines()
        tree = ast.parse(source)
        self.docstring = ast.get_docstring(tree) or ""
        self.modules = {}  # local name -> module of the package
        self.imported = {}  # local name -> (module of the package, name there)
        self.outside = {}  # local name -> (from, what), or (None, what)
        self.definitions = []
        end = 0
        for node in tree.body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self._import(node)
            elif not (
                isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            ):
                start = min([node.lineno] + [x.lineno for x in _decorators(node)]) - 1
                while start > end and self.lines[start - 1].startswith("#"):
                    start -= 1  # comments above belong to it
                self.definitions.append(Definition(self, node, start, node.end_lineno))
            end = node.end_lineno
        self.defined = {x for d in self.definitions if _defines(d) for x in d.names}

    def _import(self, node):
        for alias in node.names:
            here = alias.asname or alias.name
            what = alias.name + (f" as {alias.asname}" if alias.asname else "")
            if isinstance(node, ast.Import):
                self.outside[here] = None, what
            elif not node.module.startswith(PACKAGE):
                self.outside[here] = node.module, what
            elif _is_module(f"{node.module}.{alias.name}"):
                self.modules[here] = f"{node.module}.{alias.name}"
            else:
                self.imported[here] = node.module, alias.name


def _decorators(node):
    return getattr(node, "decorator_list", [])


def _defined(node):
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Assign):
        found = (x for target in node.targets for x in ast.walk(target))
        return [x.id for x in found if isinstance(x, ast.Name)]
    # A call on something defined before, as f.defvjp(..): it goes where f goes.
    first = node.value.func
    while isinstance(first, ast.Attribute):
        first = first.value
    return [first.id]


def _bound_in(top):
    """Names that arguments, assignments and inner functions bind."""
    found = set()
    for x in ast.walk(top):
        if isinstance(x, ast.arg):
            found.add(x.arg)
        elif isinstance(x, ast.Name) and not isinstance(x.ctx, ast.Load):
            found.add(x.id)
        elif isinstance(x, (ast.FunctionDef, ast.ExceptHandler)) and x is not top:
            found.add(x.name)
    return found


def _defines(definition):
    return not isinstance(definition.node, ast.Expr)


def _is_module(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent is a module, not a package
        return False


class Collector:
    """Follows names from `gdn2` and keeps what is reached, modules in order of need."""

    def __init__(self, stage):
        self.stage = stage
        self.modules = {}  # name -> Module
        self.needs = {}  # name -> names of the modules it uses, in order
        self.reached = set()
        self.outside = set()  # (from, what) of imports
        self.alone = self._what_the_file_has_instead()
        self.reach(self.module(api.__name__), "gdn2")
        self.order = []  # a module after those it needs
        self._place(api.__name__)

    def _what_the_file_has_instead(self):
        """Definitions of the package that hold all stages, here for one of them."""
        return {
            (api.__name__, "STAGES"): f'STAGES = {{"{self.stage}": {self.stage}}}',
            (api.__name__, "_fastest"): (
                f'def _fastest(q, v, chunk_size):\n    return "{self.stage}"'
            ),
        }

    def module(self, name):
        if name not in self.modules:
            self.modules[name] = Module(name)
        return self.modules[name]

    def origin(self, module, name):
        """Where a name of a module is defined, through imports: (Module, name)."""
        if (module.name, name) == (f"{PACKAGE}.stages", "STAGES"):
            return self.module(api.__name__), "STAGES"
        while name in module.imported:
            other, name = module.imported[name]
            module = self.module(other)
        return module, name

    def reach(self, module, name, using=api.__name__):
        """Keep a name of a module and all that it needs; `using` is who asks."""
        module, name = self.origin(module, name)
        self.needs.setdefault(using, {})[module.name] = None
        if (module.name, name) in self.alone:
            self.reached.add((module.name, name))
            if name == "STAGES":
                stages = self.module(f"{PACKAGE}.stages")
                self.reach(self.module(stages.modules[self.stage]), self.stage)
            return
        if name not in module.defined or (module.name, name) in self.reached:
            return
        for definition in module.definitions:
            if name in definition.names:
                self.reached.update((module.name, x) for x in definition.names)
                self.follow(definition)

    def _place(self, name):
        for other in self.needs.get(name, ()):
            if other != name and other not in self.order:
                self._place(other)
        if any(module == name for module, _ in self.reached):
            self.order.append(name)

    def follow(self, definition):
        module = definition.module
        for node in ast.walk(definition.node):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                other = module.modules.get(node.value.id)
                if other:
                    self.reach(self.module(other), node.attr, module.name)
            if isinstance(node, ast.Name) and node.id not in definition.local:
                if node.id in module.outside:
                    self.outside.add(module.outside[node.id])
                else:
                    self.reach(module, node.id, module.name)

    # ------------------------------------------------------ names in one file

    def names(self):
        """(module, name) -> name in the file. Two modules may use one name, and a name
        that was `module.name` may be that of an argument where it is used.
        """
        holders, shadowed = {}, set()
        for module, name in sorted(self.reached, key=lambda x: self.order.index(x[0])):
            holders.setdefault(name, []).append(module)
        for name in self.order:
            for definition in self._kept(self.modules[name]):
                for node in ast.walk(definition.node):
                    found = self._elsewhere(definition, node)
                    if found and found[1] in definition.local:
                        shadowed.add(found)
        chosen = {}
        for name, modules in holders.items():
            for module in modules:
                short = module.rpartition(".")[2]
                clash = len(modules) > 1 and module != api.__name__
                taken = clash or (module, name) in shadowed
                chosen[module, name] = f"{name}_of_{short}" if taken else name
        for other in set(chosen.values()):
            owners = [key for key, value in chosen.items() if value == other]
            assert len(owners) == 1, (other, owners)
        return chosen

    def _kept(self, module):
        return [
            x
            for x in module.definitions
            if any((module.name, name) in self.reached for name in x.names)
        ]

    def _elsewhere(self, definition, node):
        """(module, name) that `alias.name` stands for; None for any other node."""
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
            return None
        other = definition.module.modules.get(node.value.id)
        if other is None or node.value.id in definition.local:
            return None
        module, name = self.origin(self.module(other), node.attr)
        return module.name, name

    # ------------------------------------------------------ text

    def text(self, definition, names):
        """The lines of a definition, names replaced where the file has others."""
        module = definition.module
        for key in ((module.name, x) for x in definition.names):
            if key in self.alone:
                return self.alone[key]
        changes = []  # line, first column, last column, text
        for node in ast.walk(definition.node):
            found = self._elsewhere(definition, node)
            if found:
                place = node.lineno, node.col_offset, node.end_col_offset
                changes.append((*place, names[found]))
            elif isinstance(node, ast.Name) and node.id not in definition.local:
                origin, name = self.origin(module, node.id)
                new = names.get((origin.name, name), node.id)
                if new != node.id:
                    changes.append(
                        (node.lineno, node.col_offset, node.end_col_offset, new)
                    )
        lines = [x.encode() for x in module.lines]  # columns count bytes
        for line, first, last, new in sorted(changes, reverse=True):
            old = lines[line - 1]
            lines[line - 1] = old[:first] + new.encode() + old[last:]
        kept = [x.decode() for x in lines[definition.start : definition.end]]
        text = "\n".join(kept)
        own = names[module.name, definition.names[0]]
        if own != definition.names[0] and _defines(definition):
            text = re.sub(
                rf"^(def |class |){definition.names[0]}\b",
                rf"\1{own}",
                text,
                count=1,
                flags=re.M,
            )
        return text

    def file(self):
        names = self.names()
        stage = self.module(f"{PACKAGE}.stages.{self.stage}").docstring
        header = HEADER.format(
            stage=self.stage,
            what=re.sub(
                r"^Stage \d: (.)", lambda x: x[1].upper(), stage.split("\n\n")[0]
            ),
            version=environment.__version__,
            address=ADDRESS,
        )
        sections = [header + "\n" + self._imports()]
        for name in self.order:
            module = self.modules[name]
            sections.append(_title(name, module.docstring))
            sections += [self.text(x, names) for x in self._kept(module)]
        text = "\n\n\n".join(x.strip("\n") for x in sections) + "\n"
        return _one_stage_only(text, self.stage)

    def _imports(self):
        lines = [f"import {what}" for origin, what in self.outside if origin is None]
        origins = {origin for origin, _ in self.outside} - {None}
        for origin in origins:
            names = sorted(what for other, what in self.outside if other == origin)
            lines.append(f"from {origin} import {', '.join(names)}")
        lines.sort(key=lambda line: (line.startswith("from"), line))
        groups = [[x for x in lines if (" jax" in x) == last] for last in (False, True)]
        return "\n\n".join("\n".join(group) for group in groups if group)


def _title(name, docstring):
    path = name.removeprefix(PACKAGE + ".").replace(".", "/")
    lines = [f"{'-' * 20} {path}.py", *docstring.splitlines()]
    return "\n".join(f"# {line}".rstrip() for line in lines)


def _one_stage_only(text, stage):
    """The docstring of `gdn2` speaks of all stages."""
    old = re.compile(
        r"( +)stage: one of `gdn2_kernels.STAGES`.*?(?=\n +precision:)", re.S
    )
    new = rf'\1stage: "auto" or "{stage}": this file has no other.'
    text, count = old.subn(new, text)
    assert count == 1
    return text


def export(stage: str) -> str:
    """Source of a file with `gdn2` and one stage, without anything it does not use.

    stage: one of `gdn2_kernels.STAGES`.

    Raises:
      ValueError: an unknown stage.
    """
    if stage not in api.STAGES:
        known = ", ".join(map(repr, api.STAGES))
        raise ValueError(f"stage: expected one of {known}, got {stage!r}")
    return Collector(stage).file()


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PACKAGE} export",
        description="Write one stage as one file that needs only JAX.",
    )
    parser.add_argument("stage", choices=api.STAGES)
    parser.add_argument("-o", "--output", metavar="FILE", help="default: gdn2_STAGE.py")
    chosen = parser.parse_args(arguments)
    path = Path(chosen.output or f"gdn2_{chosen.stage}.py")
    text = export(chosen.stage)
    path.write_text(text)
    print(f"{path}: gdn2 with stage {chosen.stage!r}, {len(text.splitlines())} lines")
