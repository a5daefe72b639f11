"""The layout rules of the package, checked on its source: the order of folders, sizes, names, imports."""

import ast
import re
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "wandistiller"
ORDER = """
    experts batch utils flow distributed engine network wan tiny teacher data objectives student checkpoint
    config monitoring export evaluation training planner cli __main__
""".split()
"""Folders, and top-level modules, in import order: each imports only from itself and those before it."""
ALLOWED = {
    "deepspeed.accelerator": {"distributed.device"},
    "deepspeed": {"distributed", "engine", "network.blocks", "teacher", "student", "cli.doctor"},
    "diffusers": {"network.sampling", "wan", "export", "tiny"},
    "transformers": {"wan", "evaluation", "tiny"},
    "torch.distributed": {"distributed", "cli.failures"},
    "peft": {"network.adapters"},
    "torchao": {"teacher"},
    "matplotlib": {"monitoring.charts"},
    "av": {"data.videos", "utils.images"},
    "datasets": {"data.hub_prompts"},
}
"""The folders, or single modules, that may import a library."""
LIGHT = [
    "__main__",
    "cli.main",
    "cli.parser",
    "config.run_config",
    "distributed.shutdown",
    "distributed.launchers",
]
"""Modules that `--help` and a wrong flag import: no torch, which takes seconds."""
MODULES = sorted(
    ".".join(p.relative_to(PACKAGE).with_suffix("").parts)
    for p in PACKAGE.rglob("*.py")
    if p.stem != "__init__"
)


@cache
def source(module: str) -> str:
    return (PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(source(module))


@cache
def imports(module: str) -> frozenset[str]:
    """Return all names that a module imports, also in functions; `from a import b` gives a and a.b."""
    found: set[str] = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module}: write absolute imports"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def own_imports(module: str) -> set[str]:
    """The package's own modules that a module imports."""
    return {i.removeprefix("wandistiller.") for i in imports(module)} & set(MODULES)


def room(module: str) -> str:
    """The folder that a module lies in; its own name if it lies in none."""
    return module.partition(".")[0]


def with_all_imports(module: str, seen: set[str]) -> set[str]:
    """Add to `seen` what is executed when a module is imported: its imports outside functions, and theirs."""
    for node in tree(module).body:
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else names
        for name in names:
            inner = {f"{name}.{a.name}" for a in node.names} | {name}
            seen.add(name)
            for own in {i.removeprefix("wandistiller.") for i in inner} & set(MODULES):
                if f"wandistiller.{own}" not in seen or own == name.removeprefix("wandistiller."):
                    if own not in seen:
                        seen.add(own)
                        with_all_imports(own, seen)
    return seen


def functions(module: str) -> list[ast.FunctionDef]:
    return [n for n in ast.walk(tree(module)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def unannotated(function: ast.FunctionDef) -> list[str]:
    """List what lacks a type: arguments other than self and cls, and the return value of all but __init__."""
    a = function.args
    arguments = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
    missing = [x.arg for x in arguments if x.annotation is None and x.arg not in ("self", "cls")]
    if function.returns is None and function.name != "__init__":
        missing.append("return")
    return missing


def offenders(found: Callable[[str], object]) -> dict[str, object]:
    """Map each module for which `found` gives anything to that."""
    return {module: it for module in MODULES if (it := found(module))}


def test_every_folder_has_its_place_in_the_order() -> None:
    assert sorted({room(m) for m in MODULES} - set(ORDER)) == []


def test_every_library_that_is_imported_is_named_in_setup_py() -> None:
    named = (PACKAGE.parent / "setup.py").read_text().lower().replace("_", "-")
    distributions = packages_distributions()

    def unnamed(module: str) -> list[str]:
        tops = (
            {name.partition(".")[0] for name in imports(module)} - sys.stdlib_module_names - {"wandistiller"}
        )
        names = {distributions.get(top, [top])[0].lower().replace("_", "-") for top in tops}
        return [name for name in names if not re.search(rf'"{re.escape(name)}["<>=\[]', named)]

    assert offenders(unnamed) == {}


def test_a_module_imports_only_from_folders_before_its_own() -> None:
    def later(module: str) -> list[str]:
        mine = ORDER.index(room(module))
        return [i for i in own_imports(module) if ORDER.index(room(i)) > mine]

    assert offenders(later) == {}


def test_only_plan_and_the_choice_of_compiled_blocks_import_what_estimates_time() -> None:
    estimates = {"planner.time", "network.flops"}
    users = offenders(lambda m: own_imports(m) & estimates if m not in estimates else ())
    assert users.keys() == {"cli.plan", "cli.plan_report", "planner.compiling"}


def test_no_modules_import_each_other_in_a_circle() -> None:
    left = {m: own_imports(m) - {m} for m in MODULES}
    while free := [m for m in left if not left[m] & left.keys()]:
        for module in free:
            del left[module]
    assert left == {}


@pytest.mark.parametrize("library", ALLOWED)
def test_a_library_is_imported_only_where_it_belongs(library: str) -> None:
    users = offenders(lambda m: [i for i in imports(m) if i == library or i.startswith(library + ".")])
    assert [m for m in users if not {m, room(m)} & ALLOWED[library]] == []


INSIDE_WAN = re.compile(
    r"\b(WanTransformerBlock|attn[12]|ffn|to_[qkv]|to_out|norm_[qk]|norm[123]|norm_out|proj_out|rope|act_fn"
    r"|patch_embedding|condition_embedder|time_embedder|time_proj|text_embedder|scale_shift_table)\b"
    r"|\bblocks\.(?! )"
)
"""Names of modules in a Wan transformer; not its list `blocks`, which any of its kind has."""
EXAMPLES = {"config.run_config", "network.adapters", "utils.parameter_patterns"}
"""Modules that name some to people, as keys of recipes."""


def test_only_wan_and_the_exports_name_the_modules_of_a_wan_transformer() -> None:
    def named(module: str) -> set[str]:
        if room(module) in ("wan", "tiny", "export") or module in EXAMPLES:
            return set()
        nodes = list(ast.walk(tree(module)))
        texts = {id(n.value) for n in nodes if isinstance(n, ast.Expr)}
        strings = [n.value for n in nodes if isinstance(n, ast.Constant) and id(n) not in texts]
        names = [n.attr for n in nodes if isinstance(n, ast.Attribute)]
        return {s for s in [*strings, *names] if isinstance(s, str) and INSIDE_WAN.search(s)}

    assert offenders(named) == {}


def test_only_the_device_module_knows_the_kind_of_accelerator() -> None:
    assert offenders(lambda m: "torch.cuda" in source(m)) == {"distributed.device": True}


@pytest.mark.parametrize("module", LIGHT)
def test_help_and_a_wrong_flag_import_no_torch(module: str) -> None:
    assert {i.partition(".")[0] for i in with_all_imports(module, set())} & {
        "torch",
        "deepspeed",
        "diffusers",
    } == set()


def test_one_function_opens_the_jsons_that_a_run_names_and_one_those_of_a_pipeline() -> None:
    def openers(module: str) -> list[str]:
        if "wandistiller.engine.ds_config.load" not in imports(module):
            return []
        calls = {
            f.name: [ast.unparse(n.func) for n in ast.walk(f) if isinstance(n, ast.Call)]
            for f in functions(module)
        }
        return [name for name, called in calls.items() for one in called if one == "load"]

    assert offenders(openers) == {"config.validate": ["_opened"], "planner.sampling": ["read_placed"]}


def test_no_other_folder_imports_the_files_that_made_the_embedded_teachers() -> None:
    def makers(module: str) -> list[str]:
        return [i for i in own_imports(module) if i.startswith("tiny.making.")]

    assert [module for module in offenders(makers) if not module.startswith("tiny.making.")] == []


def test_every_function_is_annotated_in_full() -> None:
    assert offenders(lambda m: {f.name: missing for f in functions(m) if (missing := unannotated(f))}) == {}


def test_a_test_that_a_docstring_names_is_there() -> None:
    def missing(module: str) -> list[str]:
        named = re.findall(r"(tests/[\w/]+\.py)(?:::\s*(\w+))?", source(module))
        files = {file: PACKAGE.parent / file for file, _ in named}
        there = {file: path.read_text() if path.is_file() else "" for file, path in files.items()}
        return [
            f"{file}::{name}"
            for file, name in named
            if (f"def {name}(" if name else "import") not in there[file]
        ]

    assert offenders(missing) == {}


def test_no_file_is_over_400_lines() -> None:
    files = [*PACKAGE.rglob("*.py"), *Path(__file__).parent.rglob("*.py")]
    lengths = {str(file): len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert {file: lines for file, lines in lengths.items() if lines > 400} == {}


def test_no_function_is_over_60_lines() -> None:
    assert offenders(lambda m: [f.name for f in functions(m) if f.end_lineno - f.lineno >= 60]) == {}


def test_every_public_class_and_every_module_has_a_docstring() -> None:
    def bare(module: str) -> list[str]:
        classes = [n for n in tree(module).body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")]
        names = [c.name for c in classes if not ast.get_docstring(c)]
        return names if ast.get_docstring(tree(module)) else ["the module", *names]

    assert offenders(bare) == {}


def test_no_assert_stands_where_python_minus_O_would_drop_it() -> None:
    assert offenders(lambda m: [n.lineno for n in ast.walk(tree(m)) if isinstance(n, ast.Assert)]) == {}


def test_an_import_changes_nothing_elsewhere() -> None:
    """Patches of libraries are applied by one call where a process begins: `patch_deepspeed`."""

    def changes(module: str) -> list[str]:
        body = tree(module).body
        own = {ast.unparse(t) for n in body if isinstance(n, ast.Assign) for t in n.targets}
        calls = [n.value.func for n in body if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)]
        targets = [t for n in body if isinstance(n, ast.Assign) for t in n.targets]
        places = calls + [t for t in targets if isinstance(t, ast.Attribute | ast.Subscript)]
        return [text for text in map(ast.unparse, places) if re.split(r"[.\[]", text)[0] not in own]

    assert offenders(changes) == {}


def test_no_module_reads_pickles() -> None:
    def pickles(module: str) -> set[str]:
        calls = {ast.unparse(node.func) for node in ast.walk(tree(module)) if isinstance(node, ast.Call)}
        own = {
            c
            for c in calls
            if c.startswith(("torch.load", "zero_to_fp32.")) or c.endswith(".load_checkpoint")
        }
        return own | imports(module) & {"pickle", "cloudpickle", "dill", "joblib"}

    assert offenders(pickles) == {}


CLOCKS = (
    "time.time",
    "time.time_ns",
    "datetime.now",
    "datetime.utcnow",
    "datetime.today",
    "date.today",
    "time.localtime",
)
FILE_TIMES = ("st_mtime", "st_mtime_ns", "st_ctime", "st_atime")


def test_nothing_but_a_stamp_for_people_reads_the_wall_clock() -> None:
    """A change of the clock is felt by no deadline, no duration and no order of files."""

    def clocks(module: str) -> list[str]:
        names = [n for n in ast.walk(tree(module)) if isinstance(n, ast.Attribute)]
        found = [ast.unparse(n) for n in names if ast.unparse(n).endswith(CLOCKS)]
        return sorted(found + [n.attr for n in names if n.attr in FILE_TIMES])

    assert offenders(clocks) == {
        "distributed.watchdog": ["time.time"],
        "utils.files": ["st_mtime_ns"],
    }
