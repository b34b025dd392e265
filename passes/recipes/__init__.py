"""Published recipes, one a file: ``passes/recipes/NAME.py`` holds a function NAME that returns an ``fp4.Policy``."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from dataclasses import dataclass
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


@dataclass(frozen=True)
class About:
    """A recipe to read: its text (source, operands, what differs between paper and code), its flags, its policy."""

    text: str
    flags: dict[str, Any]
    policy: Policy


def describe(name: str) -> About:
    """What a recipe is. Raises PolicyError for an unknown name."""
    function = _function(name)
    flags = {k: p.default for k, p in inspect.signature(function).parameters.items()}
    return About(f"{inspect.getdoc(inspect.getmodule(function))}\n\n{inspect.getdoc(function)}", flags, function())


def recipe(name: str, **flags: Any) -> Policy:
    """The policy of a published recipe; its flags are the function's keyword arguments.

    Raises PolicyError for an unknown name or flag, listing the known ones.
    """
    function = _function(name)
    known = inspect.signature(function).parameters
    if unknown := sorted(set(flags) - set(known)):
        raise PolicyError(f"recipe {name} has no flag {', '.join(unknown)}; its flags: {', '.join(known) or 'none'}")
    return function(**flags)


def _function(name: str) -> Any:
    if not isinstance(name, str) or name not in [m.name for m in pkgutil.iter_modules(__path__)]:
        raise PolicyError(f"there is no recipe {name!r}; the recipes: {', '.join(recipes())}")
    return getattr(importlib.import_module(f"{__name__}.{name}"), name)
