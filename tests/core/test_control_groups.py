"""What control groups let a process take, in both of their versions."""

from __future__ import annotations

import pytest

from forerun.core.control_groups import cpu_quota, memory_left


def control_groups(root, memberships, **limits):
    """A system under `root` whose process is in some groups; `limits` are files by their path below /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("\n".join(memberships) + "\n")
    for path, content in limits.items():
        file = root / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content + "\n")
    return root


V1 = ["12:memory:/docker/7f", "5:cpu,cpuacct:/docker/7f", "1:name=systemd:/docker/7f", "0::/system.slice"]


@pytest.mark.parametrize(
    ("memberships", "limits", "quota"),
    [
        (["0::/"], {"cpu.max": "200000 100000"}, 2.0),
        (["0::/"], {"cpu.max": "max 100000"}, None),
        (["0::/"], {}, None),
        (["0::/a/b"], {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000", "cpu.max": "400000 100000"}, 1.5),
        (["0::/../../elsewhere"], {"cpu.max": "50000 100000"}, 0.5),
        (V1, {"cpu/docker/7f/cpu.cfs_quota_us": "300000", "cpu/docker/7f/cpu.cfs_period_us": "100000"}, 3.0),
        (V1, {"cpu/cpu.cfs_quota_us": "20000", "cpu/cpu.cfs_period_us": "10000"}, 2.0),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        (["0::/"], {"cpu.max": "nonsense"}, None),
    ],
)
def test_the_quota_is_the_least_of_the_groups_that_hold_the_process(tmp_path, memberships, limits, quota):
    assert cpu_quota(control_groups(tmp_path, memberships, **limits)) == quota


def test_a_system_without_control_groups_sets_no_quota(tmp_path):
    assert cpu_quota(tmp_path) is None
    assert memory_left(tmp_path) is None


STAT = "anon 100\ninactive_file 30\nactive_file 20"


@pytest.mark.parametrize(
    ("memberships", "limits", "left"),
    [
        (["0::/"], {"memory.max": "1000", "memory.current": "400", "memory.stat": STAT}, 630),
        (["0::/"], {"memory.max": "max", "memory.current": "400", "memory.stat": STAT}, None),
        (["0::/"], {"memory.max": "300", "memory.current": "400", "memory.stat": STAT}, 0),
        (["0::/"], {"memory.max": "1000"}, None),
        (
            ["0::/a"],
            {
                "a/memory.max": "1000",
                "a/memory.current": "400",
                "a/memory.stat": STAT,
                "memory.max": "900",
                "memory.current": "700",
                "memory.stat": "inactive_file 0",
            },
            200,
        ),
        (
            V1,
            {
                "memory/docker/7f/memory.limit_in_bytes": "1000",
                "memory/docker/7f/memory.usage_in_bytes": "400",
                "memory/docker/7f/memory.stat": "inactive_file 1\ntotal_inactive_file 50",
            },
            650,
        ),
    ],
)
def test_the_memory_that_is_left_is_the_least_of_the_groups_that_hold_the_process(tmp_path, memberships, limits, left):
    assert memory_left(control_groups(tmp_path, memberships, **limits)) == left
