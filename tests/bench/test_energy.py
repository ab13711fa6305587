"""Energy: wrapping counters, missing sensors, and the figures computed from joules."""

from __future__ import annotations

import sys
import time
from types import ModuleType

import pytest

from forerun.bench.energy import Counter, Energy, EnergyMeter, RaplDomain, find_gpus, find_rapl


def save_domain(root, folder, name, energy, most=1000):
    path = root / folder
    path.mkdir(parents=True, exist_ok=True)
    (path / "name").write_text(f"{name}\n")
    (path / "energy_uj").write_text(f"{energy}\n")
    (path / "max_energy_range_uj").write_text(f"{most}\n")
    return path


@pytest.fixture
def powercap(tmp_path):
    """Two packages with cores and memory, and the platform that holds all of them."""
    save_domain(tmp_path, "intel-rapl:0", "package-0", 100)
    save_domain(tmp_path, "intel-rapl:0:0", "core", 100)
    save_domain(tmp_path, "intel-rapl:0:1", "dram", 100)
    save_domain(tmp_path, "intel-rapl:1", "package-1", 100)
    save_domain(tmp_path, "intel-rapl:2", "psys", 100)
    save_domain(tmp_path, "intel-rapl-mmio:0", "package-0", 100)
    return tmp_path


def test_a_counter_that_starts_again_at_0_goes_on(tmp_path):
    domain = RaplDomain(save_domain(tmp_path, "intel-rapl:0", "package-0", 900, most=1000))
    found = []
    for energy in (950, 20, 20, 5):
        save_domain(tmp_path, "intel-rapl:0", "package-0", energy)
        found.append(round(1e6 * domain.joules()))
    assert found == [50, 120, 120, 1105]


def test_packages_and_memory_count_and_what_they_are_part_of_or_hold_does_not(powercap):
    counters, reason = find_rapl(powercap)
    assert [(one.part, one.name) for one in counters] == [
        ("cpu", "package-0 (intel-rapl:0)"),
        ("dram", "dram (intel-rapl:0:1)"),
        ("cpu", "package-1 (intel-rapl:1)"),
    ]
    assert reason is None


def test_without_counters_there_is_a_reason(tmp_path):
    assert find_rapl(tmp_path / "absent") == ([], f"no RAPL counter under {tmp_path / 'absent'}")


def test_counters_that_only_root_may_read_are_a_reason(powercap, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self.folder / "energy_uj"))

    monkeypatch.setattr(RaplDomain, "_now", refuse)
    counters, reason = find_rapl(powercap)
    assert counters == []
    assert reason.endswith("energy_uj may be read by root only")


class FakeNvml(ModuleType):
    """Two GPUs, whose counters are in millijoules."""

    class NVMLError(Exception):
        """NVML's."""

    def __init__(self, *, energies=(5000, 7000), broken=False):
        super().__init__("pynvml")
        self.energies = list(energies)
        self.broken = broken

    def nvmlInit(self):  # noqa: N802
        if self.broken:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self.energies)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):  # noqa: N802
        return self.energies[handle]

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return f"Abacus {handle}"


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_gpus_count_from_where_they_are(nvml):
    counters, reason = find_gpus()
    nvml.energies = [6500, 7000]
    assert [(one.name, one.read()) for one in counters] == [("Abacus 0", 1.5), ("Abacus 1", 0.0)]
    assert reason is None


@pytest.mark.parametrize(
    ("visible", "names"), [("1", ["Abacus 1"]), ("GPU-1, GPU-0", ["Abacus 1", "Abacus 0"]), ("", [])]
)
def test_only_visible_gpus_count(nvml, visible, names):
    assert [one.name for one in find_gpus(visible)[0]] == names


def test_a_missing_driver_or_package_is_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(broken=True))
    assert find_gpus() == ([], "NVML: Driver Not Loaded")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert find_gpus()[1].startswith("nvidia-ml-py is not installed")


class Steady:
    """A counter of one part that reads these joules, one after the other, then the last again and again."""

    def __init__(self, *joules):
        self.joules = list(joules)

    def __call__(self):
        return self.joules.pop(0) if len(self.joules) > 1 else self.joules[0]


def measured(*counters, reason=None, times=(10.0, 14.0), seconds=1000.0):
    clock = iter(times)
    meter = EnergyMeter(counters, reason, sample_seconds=seconds, clock=lambda: next(clock))
    with meter:
        pass
    return meter.energy


def test_parts_are_summed_and_shared_out():
    energy = measured(
        Counter("gpu", "a GPU", "nvml_counter", Steady(1.0, 61.0)),
        Counter("cpu", "package-0", "rapl", Steady(0.0, 15.0)),
        Counter("cpu", "package-1", "rapl", Steady(0.0, 25.0)),
    )
    assert energy.to_json(output_tokens=50, total_tokens=200, requests=10) == {
        "method": "nvml_counter+rapl",
        "reason": None,
        "window_s": 4.0,
        "samples": 2,
        "gpu_j": 60.0,
        "cpu_j": 40.0,
        "dram_j": None,
        "idle_w": None,
        "net_j": None,
        "j_per_output_token": 2.0,
        "j_per_total_token": 0.5,
        "j_per_request": 10.0,
        "tokens_per_j": 0.5,
        "tokens_per_kwh": 1.8e6,
        "scope": "a GPU, package-0, package-1",
    }


def test_net_energy_is_what_rest_would_not_have_taken():
    meter = EnergyMeter(
        [Counter("cpu", "package-0", "rapl", Steady(0.0, 20.0, 20.0, 100.0))],
        sample_seconds=1000,
        clock=iter([0.0, 2.0, 2.0, 6.0]).__next__,
    )
    meter.rest(2, sleep=lambda seconds: None)
    with meter:
        pass
    assert (meter.energy.idle_w, meter.energy.joules, meter.energy.net_joules) == (10.0, 80.0, 40.0)


def nothing(energy):
    figures = energy.to_json(output_tokens=5, total_tokens=5, requests=5)
    assert (figures.pop("method"), figures.pop("window_s") >= 0, figures.pop("samples") >= 0) == (
        "unavailable",
        True,
        True,
    )
    reason = figures.pop("reason")
    assert set(figures.values()) == {None}
    return reason


def test_without_a_sensor_all_figures_are_none_with_a_reason():
    assert nothing(measured(reason="no RAPL counter")) == "no RAPL counter"


def test_a_counter_that_stands_still_measures_nothing():
    assert (
        nothing(measured(Counter("gpu", "g", "nvml_counter", Steady(3.0))))
        == "the counter of gpu did not move in 4.00 s"
    )


def test_a_counter_that_fails_spoils_the_measurement():
    def fail():
        raise OSError("gone")

    assert nothing(measured(Counter("cpu", "c", "rapl", fail))).startswith(
        "a sensor failed while it ran (OSError: gone)"
    )


def test_counters_are_looked_at_all_the_time():
    count = 0

    def read():
        nonlocal count
        count += 1
        return float(count)

    meter = EnergyMeter([Counter("cpu", "c", "rapl", read)], sample_seconds=0.01)
    with meter:
        time.sleep(0.2)
    assert meter.energy.samples >= 4


def test_a_machine_without_sensors_has_a_meter_that_says_why(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(broken=True))
    meter = EnergyMeter.of_this_machine(tmp_path)
    meter.rest(60)  # returns at once
    assert not meter.has_sensor
    with meter:
        pass
    assert nothing(meter.energy) == f"NVML: Driver Not Loaded; no RAPL counter under {tmp_path}"


def test_energy_per_token_is_not_known_where_tokens_are_not():
    energy = Energy(method="rapl", reason=None, window_s=1.0, samples=2, parts={"cpu": 10.0}, idle_w=None, scope="p")
    found = energy.to_json(output_tokens=None, total_tokens=None, requests=5)
    assert (found["j_per_request"], found["j_per_output_token"], found["tokens_per_j"]) == (2.0, None, None)
