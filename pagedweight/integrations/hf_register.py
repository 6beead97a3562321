"""Makes transformers know paged models from `import pagedweight` on, in either order of the two imports.

transformers has no entry points for quantizers, and importing it here would take seconds of every command line. So its
registry of quantizers is waited for: when Python imports that module, ours follows.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

REGISTRY = "transformers.quantizers.auto"
OURS = "pagedweight.integrations.hf_quantizer"


class RegistryFinder(MetaPathFinder):
    """Finds the registry as Python does, once, with a loader that imports our quantizer after it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        spec.loader = FollowedLoader(spec.loader)
        return spec


class FollowedLoader(Loader):
    """Another loader, and our import after its own work."""

    def __init__(self, own: Loader) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._own.exec_module(module)
        importlib.import_module(OURS)


def register() -> None:
    """Register now if transformers' registry is there already, else as soon as it is."""
    if REGISTRY in sys.modules:
        importlib.import_module(OURS)
    elif not any(isinstance(finder, RegistryFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, RegistryFinder())


def has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


def need_transformers(asked: str) -> None:
    """ModuleNotFoundError that says what to install, where transformers is not."""
    if not has_transformers():
        sentence = f"{asked} needs transformers, not installed; run: pip install 'pagedweight[hf]'"
        raise ModuleNotFoundError(sentence, name="transformers")
