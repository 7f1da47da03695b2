"""No module of the package keeps what a run has made: read from its sources.

What functions change and modules or classes hold is a `Memo`, of code alone, or it stands below with the reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import lightning_par
from tests.helpers.sources import trees_in

ROOT = Path(lightning_par.__file__).parent

# Which names of modules and classes change, though they are no memo: why that is nothing of a run.
CHANGING = {
    # slots of what runs now, put back when it has run
    "sharded/run_state.py RunState.current": "the run that is open",
    "pipeline/run/located.py Run.current": "the step that runs",
    "absent/deferred/session.py Session.current": "the build that runs",
    "strategies/signals.py Signals.installed": "those that are, for a fork to leave",
    "strategies/signals.py _masks": "what a thread that forks had blocked before, put back when it has",
    "mesh/listener.py thread": "who listens to a thread, put back when it has run",
    "mesh/progress.py Progress.current": "the run that is open",
    "mesh/ledger.py Ledger.opened": "those within their context",
    "pipeline/trial/placeholders.py AbsentNumber.count": "in the trial run that runs",
    "pipeline/trial/placeholders.py AbsentNumber.cut": "in the trial run that runs",
    "pipeline/trial/placeholders.py AbsentNumber.draw": "in the trial run that runs",
    "pipeline/trial/placeholders.py AbsentNumber.guesses": "in the trial run that runs",
    "private/compiler.py _uncompiled": "contexts that are entered; torch has one stance for the process",
    "private/fake_tensors.py log": "torch's logger, whose level is another while a trial run runs",
    # how many of a class are alive, or ever were
    "sharded/aliases/memory.py Memory.count": "",
    "sharded/aliases/memory.py Memory.made_ever": "",
    "sharded/rules/several_axes.py Mix.count": "",
    "sharded/rules/stored_weights.py Gathering.count": "",
    # of the process, and of no run
    "resume/launched_run.py _OF_PROCESS": "which run an agent has started this process for",
    "mesh/world_groups.py _of_world": "groups, which end with their world, and on which nothing is written",
    "mesh/world_groups.py _on_host": "which of these groups has the same ranks as another",
    "mesh/positions.py _alive": "equal positions are one object, as long as somebody holds it",
    "python_state/global_generators.py NUMPY": "where numpy's generator stands, of which there is one",
    "python_state/global_generators.py PYTHON": "where that of `random` stands, of which there is one",
    "python_state/iterators.py Replay.of": "who stands for one of Python's iterators, as long as somebody holds it",
    "absent/deferred/history.py _serials": "numbers for an order",
    "sharded/rules/lookup.py RULES": "filled while the rules are imported",
    "sharded/tensor.py _dispatch": "imported when it is first needed, since it needs this module",
    # what is changed in torch, and by whom it is held: a strategy holds it until its run ends, or until it is collected
    "sharded/patches/__init__.py SHARDED": "",
    "sharded/patches/__init__.py STORED": "",
    "sharded/patches/__init__.py SHARES": "",
    "sharded/patches/__init__.py NODES": "",
    "sharded/patches/__init__.py UNFINISHED": "",
    "sharded/patches/__init__.py STREAMS": "",
    "sharded/patches/__init__.py COLLECTIVES": "",
    "sharded/patches/__init__.py SYNC_ADVICE": "",
    "sharded/patches/__init__.py RESUME_ADVICE": "",
    "sharded/patches/__init__.py REPLICAS": "",
    "sharded/patches/__init__.py WORKER_SIGNALS": "",
    "sharded/patches/transforms.py TRANSFORMS": "what stands there, as long as it does",
}

_MUTATORS = frozenset(
    """
add append appendleft clear discard extend insert pop popitem popleft remove reverse setdefault sort subtract update
""".split()
)
_ACCESS = (ast.Attribute, ast.Subscript)


def last(node: ast.expr) -> str:
    """The last name of ``a.b.c`` or ``a.b.c(...)``."""
    node = node.func if isinstance(node, ast.Call) else node
    node = node.value if isinstance(node, ast.Subscript) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def assigned(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """The names that the statements of a module or a class bind, with their values."""
    for statement in body:
        if isinstance(statement, ast.Assign):
            yield from ((x.id, statement.value) for x in statement.targets if isinstance(x, ast.Name))
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, statement.value or ast.Constant(None)
        elif isinstance(statement, ast.If | ast.Try | ast.With):
            yield from assigned([x for x in ast.iter_child_nodes(statement) if isinstance(x, ast.stmt)])


class Sources:
    """The modules of the package, by path."""

    def __init__(self, root: Path) -> None:
        self.trees = {str(path.relative_to(root)): tree for path, tree in trees_in(root).items()}
        self.held = {path: dict(assigned(tree.body)) for path, tree in self.trees.items()}
        self.classes: dict[str, dict[str, ast.ClassDef]] = {}  # by name, then by path: names are used again
        for path, tree in self.trees.items():
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    self.classes.setdefault(node.name, {})[path] = node

    def is_memo(self, path: str, name: str) -> bool:
        value = self.held[path].get(name)
        return isinstance(value, ast.Call) and last(value) == "Memo"

    def changing(self) -> set[str]:
        """What is held by a module or a class and changed by a function, as ``path name`` or ``path Class.name``."""
        found = {name for path, tree in self.trees.items() for name in self._changed_in(path, tree)}
        for path, names in self.held.items():
            found |= {f"{path} {name}" for name, value in names.items() if self._can_change(value)}
        return found

    def _can_change(self, value: ast.expr) -> bool:
        """Whether it is an object of a class of the package that may change without its name being written to."""
        if not isinstance(value, ast.Call):
            return False
        if last(value) in ("local", "count"):
            return True
        kinds = self.classes.get(last(value), {}).values() if last(value) != "Memo" else ()
        frozen = ("frozen=True" in "".join(map(ast.unparse, kind.decorator_list)) for kind in kinds)
        return any(not fixed and kind.body[1:] for kind, fixed in zip(kinds, frozen))

    def _changed_in(self, path: str, tree: ast.Module) -> Iterator[str]:
        imported = dict(_imports(tree))
        for node in _in_functions(tree):
            if isinstance(node, ast.Global):
                yield from (f"{path} {name}" for name in node.names)
            for target in _written(node):
                name = self._name_of(path, imported, target)
                if name is not None:
                    yield name

    def _name_of(self, path: str, imported: dict[str, tuple[str, str]], target: ast.expr) -> str | None:
        """What of a module or class of the package ``target``, that is written to, is or lies in."""
        way: list[str] = []  # from the name that it begins with
        while isinstance(target, _ACCESS):
            way.insert(0, target.attr if isinstance(target, ast.Attribute) else "")
            target = target.value
        if not isinstance(target, ast.Name) or not way:
            return None
        home, name = imported.get(target.id, (path, target.id))
        if not name:  # a module, of which a name is written to
            name = way.pop(0)
        kind = self.classes.get(name, {}).get(home)
        if kind is not None:  # of an object that a class holds the object itself is written to
            held = way[0] in dict(assigned(kind.body)) and not any(way[1:])
            return f"{home} {name}.{way[0]}" if held else None
        known = name in self.held.get(home, {})
        return f"{home} {name}" if known and not self.is_memo(home, name) else None


def _in_functions(node: ast.AST) -> Iterator[ast.AST]:
    """What lies in functions, each node once."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        yield from ast.walk(node)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _in_functions(child)


def _imports(tree: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    """What a name stands for: the path of a module of the package, and the name in it, empty for the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_par"):
            folder = "/".join((node.module or "").split(".")[1:])
            for alias in node.names:
                module = f"{folder}/{alias.name}.py".removeprefix("/")
                is_module = (ROOT / module).exists()
                yield alias.asname or alias.name, (module, "") if is_module else (f"{folder}.py", alias.name)


def _written(node: ast.AST) -> Iterator[ast.expr]:
    """What a node writes to: by assignment, deletion, or a method that changes a container."""
    if isinstance(node, ast.Assign | ast.Delete):
        for target in node.targets:
            yield from target.elts if isinstance(target, ast.Tuple) else [target]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        yield node.target
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATORS:
        yield ast.Subscript(node.func.value, ast.Constant(0))  # as a write into it
    elif isinstance(node, ast.Call) and last(node) == "next" and node.args:
        yield ast.Subscript(node.args[0], ast.Constant(0))


def test_what_modules_keep_is_no_runs() -> None:
    found = Sources(ROOT).changing()
    strange = sorted(found - CHANGING.keys())
    assert not strange, f"A module keeps what a function changes: {strange}. Is it of a run? Then it belongs to an " \
        "object of the run, as `RunState`. Is it a fact of code? Make it a `Memo`."  # fmt: skip
    assert not CHANGING.keys() - found, "that is no longer there"


def test_what_changes_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "from lightning_par.trial.memo import Memo\n"
        "table = {}\nnumbers = []\nseen = set()\non = False\nfacts = Memo(len)\nfixed = [1]\n"
        "class Kind:\n    current = None\n    known = {}\n    def run(self):\n        Kind.current = self\n"
        "        self.own = 1\n        Kind.known['a'] = 1\n"
        "def f(x):\n    global on\n    on = True\n    table[x] = 1\n    numbers.append(x)\n    seen.discard(x)\n"
        "    facts[x] = 1\n    return fixed[0]\n"
    )
    found = {name.partition(" ")[2] for name in Sources(tmp_path).changing()}
    assert found == {"table", "numbers", "seen", "on", "Kind.current", "Kind.known"}
