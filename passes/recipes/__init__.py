"""Published recipes, one a file: ``passes/recipes/NAME.py`` holds a function NAME that returns an ``fp4.Policy``."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

from fp4.compiler.policy import Policy, PolicyError

DEFAULT = "nvfp4"


def recipes() -> dict[str, str]:
    """Name of each recipe -> one line on it."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        function = getattr(importlib.import_module(f"{__name__}.{module.name}"), module.name)
        found[module.name] = (inspect.getdoc(function) or "").partition("\n")[0]
    return found


def recipe(name: str, **flags: Any) -> Policy:
    """The policy of a published recipe; its flags are the function's keyword arguments.

    Raises PolicyError for an unknown name or flag, listing the known ones.
    """
    if not isinstance(name, str) or name not in [m.name for m in pkgutil.iter_modules(__path__)]:
        raise PolicyError(f"there is no recipe {name!r}; the recipes: {', '.join(recipes())}")
    function = getattr(importlib.import_module(f"{__name__}.{name}"), name)
    known = inspect.signature(function).parameters
    if unknown := sorted(set(flags) - set(known)):
        raise PolicyError(f"recipe {name} has no flag {', '.join(unknown)}; its flags: {', '.join(known) or 'none'}")
    return function(**flags)
