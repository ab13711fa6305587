"""Leaves out of `import torch` its Python kernels of tensors without memory, until somebody may need them.

Of the time that torch's Python modules take they take a quarter. They are for compilers, tracers and foreign models, which
compute with torch's device "meta", and import modules of torch's that torch itself has not: before the first such module, the
kernels are imported. (Who computes with meta tensors and imports nothing misses them; forerun only makes such tensors.)
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

    def __init__(self) -> None:
        self._are_left_out = False
        self._error: BaseException | None = None  # of their import, which cannot be done again

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Return what makes an empty module, or one that the kernels' import has made meanwhile; None: as ever.

        Raises:
            ImportError: the kernels' import has failed before.
        """
        if name == META_KERNELS and _is_being_imported("torch"):
            self._are_left_out = not _has_plug_ins()
            return ModuleSpec(name, self) if self._are_left_out else None
        if self._error is not None and name.startswith("torch."):
            raise ImportError(f"{META_KERNELS} could not be imported; start again", name=name) from self._error
        if self._are_left_out and name.startswith("torch.") and not _is_being_imported("torch"):
            self._are_left_out = False
            self._import_kernels()
            if name in sys.modules:
                return _Imported(sys.modules[name]).spec
        return None

    def _import_kernels(self) -> None:
        sys.modules.pop(META_KERNELS, None)
        try:
            importlib.import_module(META_KERNELS)
        except BaseException as error:
            self._error = error
            raise

    def exec_module(self, module: ModuleType) -> None:  # noqa: ARG002 - which stays as it is
        """Leave the module empty, of which only compilers take anything, but for what torch itself waits for."""
        _allow_generators()


class _Imported(Loader):
    """Loads a module that has been imported while it was looked for, and so need not run again."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._own_spec = module, module.__spec__
        self.spec = ModuleSpec(module.__name__, self, origin=getattr(module, "__file__", None))
        self.spec.submodule_search_locations = getattr(module, "__path__", None)
        module.__spec__ = self.spec  # else Python would take its own, and run it again

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002 - of this module alone
        """Return the module itself."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back."""
        module.__spec__ = self._own_spec


def _allow_generators() -> None:
    """Let torch make generators of random numbers, which torch 2.13 does not until a module that is left out has been imported."""
    import torch

    if allow := getattr(torch._C, "_set_generator_metaclass", None):
        from torch._opaque_base import OpaqueBaseMeta

        allow(OpaqueBaseMeta)


def _is_being_imported(name: str) -> bool:
    module = sys.modules.get(name)
    return module is None or bool(getattr(module.__spec__, "_initializing", False))


def _has_plug_ins() -> bool:
    """Whether torch imports others' devices at its end, which may need the kernels at once."""
    from importlib.metadata import entry_points  # here: torch imports it, too, and nothing before it does

    return bool(entry_points(group="torch.backends"))
