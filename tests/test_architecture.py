"""The rules by which the package is laid out, on the source itself: an order of modules, sizes, names, who may import what."""

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "wandistiller"
# The order in which data flows; a module imports only from modules before it.
ORDER = """
    allocators problems logs launchers hostfile files kinds exhausted config parts batch noise order fidelity objectives
    placement recompute deepspeed_values refused deepspeed_keys deepspeed_json student_json shorthands weights wan_configs shapes
    phase usage stopping builds stream manifest watch distributed pace hardware monitors engines metrics health learned
    pipeline_parts wan loading swap memory footprint flops rates machine dispatch
    items shards media conditioning pictures latents data cuts prune activations student_config start teacher
    blocks tuning fragments engine_state ema student checkpoint resume job comparison nonfinite rehearsal planner written advice
    failures check costs recommend auto plan doctor census timeline memory_picture charts memory_profile trainer probes importance
    begin prepare original adapters card export hub train replay sample clip contenders judge report evaluate run_charts
    run_report tiny_parts tiny_text tiny_experts make_tiny commandline __main__
""".split()
TINY = {"tiny_parts", "tiny_text", "tiny_experts", "make_tiny"}
LAYER_0 = """
    allocators problems logs launchers hostfile files kinds exhausted config parts batch noise order fidelity objectives
    placement recompute deepspeed_values refused deepspeed_keys deepspeed_json student_json shorthands weights wan_configs shapes
    phase usage stopping builds
""".split()
ALLOWED = {
    "deepspeed": {"distributed", "doctor", "loading", "engines", "teacher", "blocks", "fragments", "student", "checkpoint"},
    "diffusers": {"pipeline_parts", "wan", "loading", "dispatch", "latents", "sample", "start", "blocks", "tuning", "student",
                  "adapters", "export"} | TINY,
    "transformers": {"pipeline_parts", "conditioning", "clip"} | TINY,
    "torch.distributed": {"distributed", "watch", "failures"},
    "peft": {"tuning"},
}
MODULES = sorted(p.stem for p in PACKAGE.glob("*.py") if p.stem != "__init__")


@cache
def tree(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))


@cache
def imports(module: str) -> frozenset[str]:
    """Dotted names of all that a module imports, inside its functions too; `from a import b` gives a and a.b."""
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
    parts = [name.split(".") for name in imports(module)]
    return {p[1] for p in parts if p[0] == "wandistiller" and len(p) > 1} & set(MODULES)


def functions(module: str) -> list[ast.FunctionDef]:
    return [n for n in ast.walk(tree(module)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def unannotated(function: ast.FunctionDef) -> list[str]:
    """What lacks a type: arguments other than self and cls, and the return value of all but __init__."""
    a = function.args
    arguments = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
    missing = [x.arg for x in arguments if x.annotation is None and x.arg not in ("self", "cls")]
    if function.returns is None and function.name != "__init__":
        missing.append("return")
    return missing


def test_every_module_has_its_place_in_the_order() -> None:
    assert sorted(set(MODULES) - set(ORDER)) == []


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_modules_before_it(module: str) -> None:
    later = [m for m in own_imports(module) if ORDER.index(m) >= ORDER.index(module)]
    assert later == []


@pytest.mark.parametrize("library", ALLOWED)
def test_a_library_is_imported_only_where_it_belongs(library: str) -> None:
    users = {m for m in MODULES if any(i == library or i.startswith(library + ".") for i in imports(m))}
    assert sorted(users - ALLOWED[library]) == []


@pytest.mark.parametrize("module", LAYER_0)
def test_layer_0_imports_only_torch_the_standard_library_and_itself(module: str) -> None:
    known = {"torch", "wandistiller"} | ({"numpy", "PIL"} if module == "shapes" else set()) | sys.stdlib_module_names
    assert sorted({name.split(".")[0] for name in imports(module)} - known) == []
    assert sorted(own_imports(module) - set(LAYER_0)) == []


def test_no_module_of_training_imports_the_tiny_making_files() -> None:
    assert [m for m in MODULES if m not in TINY and own_imports(m) & TINY] == []


@pytest.mark.parametrize("module", MODULES)
def test_every_function_is_annotated_in_full(module: str) -> None:
    assert {f.name: missing for f in functions(module) if (missing := unannotated(f))} == {}


@pytest.mark.parametrize("module", MODULES)
def test_no_file_is_over_300_lines(module: str) -> None:
    assert len((PACKAGE / f"{module}.py").read_text(encoding="utf-8").splitlines()) <= 300


@pytest.mark.parametrize("module", MODULES)
def test_no_function_is_over_45_lines(module: str) -> None:
    assert {f.name: f.end_lineno - f.lineno + 1 for f in functions(module) if f.end_lineno - f.lineno >= 45} == {}


@pytest.mark.parametrize("module", MODULES)
def test_every_public_class_and_every_module_has_a_docstring(module: str) -> None:
    classes = [n for n in tree(module).body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")]
    assert ast.get_docstring(tree(module))
    assert [c.name for c in classes if not ast.get_docstring(c)] == []


@pytest.mark.parametrize("module", MODULES)
def test_no_assert_stands_where_python_minus_O_would_drop_it(module: str) -> None:
    assert [n.lineno for n in ast.walk(tree(module)) if isinstance(n, ast.Assert)] == []


@pytest.mark.parametrize("module", MODULES)
def test_no_module_reads_pickles(module: str) -> None:
    calls = {ast.unparse(node.func) for node in ast.walk(tree(module)) if isinstance(node, ast.Call)}
    assert not imports(module) & {"pickle", "cloudpickle", "dill", "joblib"}
    assert not {c for c in calls if c.startswith(("torch.load", "zero_to_fp32.")) or c.endswith(".load_checkpoint")}
