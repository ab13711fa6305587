"""What Linux's control groups, versions 1 and 2, let this process take: CPUs and memory, as containers limit them."""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Iterator
from pathlib import Path


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs that the process's groups allow it, the least of them; None where none sets a limit."""
    return min((limit for group in _groups("cpu", root) if (limit := _quota(group)) is not None), default=None)


def memory_left(root: Path = Path("/")) -> int | None:
    """Bytes that the process's groups let it take yet, the least of them; None where none sets a limit.

    What a group holds of files and has not used for long is free: the system gives it up.
    """
    return min((left for group in _groups("memory", root) if (left := _left(group)) is not None), default=None)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Folders of the process's own groups for a controller, and of those above them as far as they are mounted."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = mount / posixpath.normpath("/" + path).lstrip("/")  # a container's path may begin with /..
        yield group
        yield from (parent for parent in group.parents if parent == mount or mount in parent.parents)


def _quota(group: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period) if quota != "max" else None
    with contextlib.suppress(OSError, ValueError):
        quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    return None


def _left(group: Path) -> int | None:
    for limit, usage, unused in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):  # version 2 writes "max" for none, version 1 an endless number
            most, used = int((group / limit).read_text()), int((group / usage).read_text())
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            return max(0, most - used + int(counts.get(unused, 0)))
    return None
