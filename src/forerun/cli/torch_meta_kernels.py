"""Leaves out of `import torch` its Python kernels of tensors without memory, until somebody may need them.

They take a quarter of the import, and are for compilers, tracers and foreign models on torch's device "meta" alone. All of
those import modules of torch's that torch itself does not: before the first such module, the kernels are imported.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

META_KERNELS = "torch._meta_registrations"


def leave_out_meta_kernels() -> None:
    """Let the next `import torch` go without them; nothing happens where torch has been imported."""
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _MetaKernelsLater())


class _MetaKernelsLater(MetaPathFinder, Loader):
    """Finds an empty module in their place while torch is being imported, and the kernels themselves after that."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Return what makes an empty module, or one that the kernels' import has made meanwhile; None: as ever."""
        if name == META_KERNELS:
            return ModuleSpec(name, self)
        if name.startswith("torch.") and not _is_being_imported("torch") and self in sys.meta_path:
            sys.meta_path.remove(self)
            sys.modules.pop(META_KERNELS, None)
            importlib.import_module(META_KERNELS)
            if name in sys.modules:
                return _Imported(sys.modules[name]).spec
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty: nobody but compilers takes anything out of it."""


class _Imported(Loader):
    """Loads a module that has been imported while it was looked for, and so need not run again."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._own_spec = module, module.__spec__
        module.__spec__ = self.spec = ModuleSpec(
            module.__name__, self
        )  # else Python would take its own, and run it again

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002 - of this module alone
        """Return the module itself."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back."""
        module.__spec__ = self._own_spec


def _is_being_imported(name: str) -> bool:
    module = sys.modules.get(name)
    return module is None or bool(getattr(module.__spec__, "_initializing", False))
