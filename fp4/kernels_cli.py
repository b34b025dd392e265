"""``fp4 kernels``: compile the kernels of a training step with no GPU, and inspect them."""

from __future__ import annotations

import sys
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

RECIPE, SHOW = "Which kernels", "What is shown"


def _fail(error: object, code: int = 2) -> NoReturn:
    Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
    raise typer.Exit(code)


def _option(panel: str, text: str, *flags: str, default: bool | str = True) -> Any:
    return typer.Option(*flags, help=text, rich_help_panel=panel, show_default=default)


def _shapes(text: str) -> list[tuple[int, int, int]]:
    """ "16384x4096x4096,..." as (M, N, K)."""
    found = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        sizes = part.split("x")
        if len(sizes) != 3 or not all(s.isdecimal() and int(s) for s in sizes):
            _fail(f"--shapes {part}; write M x N x K, e.g. 16384x4096x4096")
        found.append((int(sizes[0]), int(sizes[1]), int(sizes[2])))
    return found


def kernels(
    target: Annotated[str, _option(RECIPE, "GPU architecture, e.g. sm_90, sm_100a, sm_120a.")] = "sm_100a",
    recipe: Annotated[str, _option(RECIPE, "Names separated by commas.", default="every recipe")] = "",
    shapes: Annotated[
        str, _option(RECIPE, "Matmuls for these sizes alone: MxNxK, by commas.", default="every tile of the target")
    ] = "",
    only: Annotated[str, _option(RECIPE, "Only the kernels whose name holds this text.", default="all")] = "",
    source: Annotated[
        str | None, _option(SHOW, "Print the code of the one kernel whose name is, or holds, this text.", default="none")
    ] = None,
    level: Annotated[str, _option(SHOW, "Of --source: source (Triton), ttir, ttgir, llir, ptx or sass.")] = "source",
    json: Annotated[bool, _option(SHOW, "Print JSON.", "--json")] = False,
    markdown: Annotated[bool, _option(SHOW, "Print a Markdown table.", "--markdown")] = False,
) -> None:
    """Compile every kernel that a training step needs, with no GPU, and inspect PTX and SASS.

    Exits with 1 where a kernel spills, has a stack, is empty, or lacks an instruction that the target has for it; each is
    named on stderr.
    """
    try:
        import fp4
        from fp4.kernels.build import require_triton

        require_triton()
        from fp4.compiler.policy import PolicyError
        from fp4.kernel_table import as_json, as_markdown, as_table, as_text, candidates, rows
        from fp4.kernels.inspection import LEVELS
        from fp4.kernels.target import Target, TargetError
        from fp4.matmul_table import emulated
    except ImportError as error:
        _fail(error)
    try:
        where = Target(target)
        where.capability  # noqa: B018  the interpreter has none
        recipes = [name.strip() for name in recipe.split(",") if name.strip()]
        found = candidates(recipes, where, _shapes(shapes))
        left = emulated(recipes or list(fp4.recipes()), where)
    except (TargetError, PolicyError) as error:
        _fail(error)
    if level not in LEVELS:
        _fail(f"--level {level}; write one of {', '.join(LEVELS)}")
    wanted = only if source is None else source
    found = [k for k in found if k.name == wanted] or [k for k in found if wanted in k.name]
    if not found:
        _fail(f"no kernel's name holds {wanted!r}; `fp4 kernels --target {target}` lists them")
    if source is not None:
        if len(found) > 1:
            _fail(
                f"{source!r} is in the names of {len(found)} kernels; write more of one of:\n"
                + "\n".join(k.name for k in found)
            )
        print(found[0].source(where) if level == "source" else getattr(found[0].compile(where), level))
        return
    console = Console()
    done = []
    status = Console(stderr=True).status("") if sys.stderr.isatty() else None
    if status:
        status.start()
    for row in rows(found, where):
        done.append(row)
        if status:
            status.update(f"{len(done)} of {len(found)} kernels")
    if status:
        status.stop()
    if json:
        print(as_json(done, where))
    elif markdown:
        print(as_markdown(done))
    elif console.is_terminal:
        console.print(as_table(done, f"{where.name}, compiled and inspected, not run"))
    else:
        print(as_text(done))
    for line in left:
        Console(stderr=True).print(f"emulated: {escape(line)}", highlight=False, soft_wrap=True)
    bad = [row for row in done if row.faults]
    for row in bad:
        Console(stderr=True).print(
            f"[red]{escape(row.kernel)}:[/] {escape('; '.join(row.faults))}", highlight=False, soft_wrap=True
        )
    if bad:
        raise typer.Exit(1)
