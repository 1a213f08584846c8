"""The doctor: what it finds on a sound machine, on a broken one, and when it says no."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from minispec import Pair
from minispec.cli import main
from minispec.pair import weights_folder
from minispec.show import doctor, measures
from minispec.show.doctor import Finding


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {finding["name"]: finding for finding in report["findings"]}


def examined(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit status and findings of `minispec doctor --json`."""
    try:
        status = main(["doctor", "--json", *args])
    except SystemExit as stop:
        status = int(stop.code or 0)
    out = capsys.readouterr().out
    assert "NaN" not in out
    report = json.loads(out)
    assert report["schema"] == "minispec-doctor-1"
    assert report["ready"] == (status == 0)
    return status, by_name(report)


def test_one_thread_and_no_cache_folder_are_said_and_do_not_stop(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Everything, on the shipped pair: a file stands where the folder should be, and the tests run on one thread."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("MINISPEC_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(measures, "cores", lambda: 4)
    status, found = examined(capsys)
    assert status == 0
    assert found["threads"]["state"] == "note"
    assert found["threads"]["figures"] == {"threads": 1, "cores": 4}
    assert "OMP_NUM_THREADS" in found["threads"]["todo"]
    assert found["cache folder"]["state"] == "fail"
    assert not found["cache folder"]["needed"]
    assert "MINISPEC_CACHE" in found["cache folder"]["todo"]
    assert found["weights"]["state"] == "ok"
    assert found["generation"]["figures"]["tokens"] == 20
    assert found["exactness"]["figures"]["total_variation"] < 1e-10
    assert found["memory"]["figures"]["gigabytes_per_second"] > 0
    assert found["passes"]["figures"]["target_ms"] > found["passes"]["figures"]["draft_step_ms"] > 0
    assert 0 < found["speculation"]["figures"]["acceptance"] <= 1
    assert found["speculation"]["figures"]["draft_len"] >= 0


@pytest.fixture
def pair_folder(tmp_path: Path) -> Path:
    """A copy of the pair without its big file."""
    for name in ("config.json", "tokenizer.tiktoken", "draft.safetensors"):
        shutil.copy(weights_folder() / name, tmp_path)
    return tmp_path


def test_a_damaged_weight_file_stops(capsys: pytest.CaptureFixture[str], pair_folder: Path) -> None:
    (pair_folder / "target.safetensors").write_bytes(b"garbage")
    status, found = examined(capsys, "--pair", str(pair_folder))
    assert status == 1
    target = found["weights: target.safetensors"]
    assert (target["state"], target["needed"]) == ("fail", True)
    assert "damaged: SHA-256 is" in target["found"]
    assert "fetch the file again" in target["todo"]
    assert found["generation"]["state"] == found["speed"]["state"] == "skipped"
    assert found["exactness"]["state"] == "ok"  # needs no weights
    missing = found["weights: misaligned.safetensors"]  # nothing needs it but --draft misaligned
    assert (missing["state"], missing["needed"]) == ("fail", False)


def test_a_file_that_only_an_option_needs_does_not_stop(shipped: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = {"misaligned.safetensors": "no such file"}
    monkeypatch.setattr(measures, "damage", lambda path, wanted: problem.get(path.name))
    findings = list(doctor._weights(patient := doctor.Patient(weights_folder(), "cpu")))
    assert [(f.state, f.needed) for f in findings] == [("fail", False), ("ok", False)]
    assert patient.broken == []
    assert doctor.ready(findings)


def test_no_pair_at_all(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, found = examined(capsys, "--pair", str(tmp_path))
    assert status == 1
    assert "config.json: no such file" in found["weights"]["found"]


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "EXAMINATIONS", (doctor._device,))
    status, found = examined(capsys, "--device", "tpu9")
    assert (status, found["device"]["state"]) == (1, "fail")
    patient = doctor.Patient(weights_folder(), "tpu9")
    (finding,) = doctor._device(patient)
    assert (finding.state, finding.needed) == ("fail", True)
    assert finding.todo == "ask for --device cpu"
    assert patient.device == "cpu"


def test_a_wrong_law_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that always emits token 0 is caught by the examination in miniature."""

    class Wrong:
        tokens = (0, 0, 0)

    def wrong(*args: object, rng: Any, **options: object) -> Wrong:
        rng.flip(torch.tensor([0.5]))
        return Wrong()

    monkeypatch.setattr(doctor, "speculate", wrong)
    (finding,) = doctor._exact_law(doctor.Patient(weights_folder(), "cpu"))
    assert finding.state == "fail"
    assert not doctor.ready([finding])
    assert torch.get_num_threads() == 1


def test_a_crash_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(patient: doctor.Patient) -> Any:
        raise RuntimeError("no\nluck")

    ticks: list[int] = []
    monkeypatch.setattr(doctor, "EXAMINATIONS", (crash, doctor._torch))
    findings = doctor.examine(tick=lambda: ticks.append(1))
    assert (findings[0].name, findings[0].state, findings[0].found) == ("crash", "fail", "RuntimeError: no luck")
    assert findings[1].name == "torch"
    assert ticks == [1, 1]


FINDINGS = [
    Finding("threads", "note", "one thread, 4 cores", "unset OMP_NUM_THREADS"),
    Finding("weights: target.safetensors", "fail", "damaged: SHA-256 is 1, should be 2", "fetch the file again", True),
    Finding("generation", "skipped", "not tried without target.safetensors"),
    Finding("memory", "ok", "10.0 GB/s, by a plain read of 256 MB"),
]


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_each_failing_line_says_what_to_do(width: int) -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="cp1252", errors="strict", write_through=True), width=width)
    doctor.show(FINDINGS, console)
    lines = raw.getvalue().decode("cp1252").splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert lines[0].startswith("note")
    assert any(line.startswith("FAIL") for line in lines)
    assert "NOT ready" in text
    if width >= 80:
        assert "-> unset OMP_NUM_THREADS" in text
        assert "-> fetch the file again" in text
    assert not doctor.ready(FINDINGS)
    assert doctor.ready([finding for finding in FINDINGS if not finding.needed])


def test_an_old_python_and_a_narrow_console_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 0, "final", 0))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="cp1252"))
    python, terminal = doctor._python(doctor.Patient(weights_folder(), "cpu"))
    monkeypatch.undo()
    assert python.todo == "use Python 3.10 to 3.13"
    assert terminal.state == "note"
    assert "PYTHONUTF8" in str(terminal.todo)


def test_a_busy_machine_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "load", lambda: 9.0)
    monkeypatch.setattr(measures, "cores", lambda: 2)
    findings = {finding.name: finding for finding in doctor._threads(doctor.Patient(weights_folder(), "cpu"))}
    assert "close other programs" in str(findings["load"].todo)


def test_looking_at_a_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    assert measures.unwritable(tmp_path / "a" / "b") is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "kept").mkdir()
    assert measures.unwritable(tmp_path / "kept") is None
    assert (tmp_path / "kept").is_dir()
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert measures.unwritable(tmp_path / "file" / "below") is not None


def test_damage(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    right = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert measures.damage(tmp_path / "x", right) is None
    assert "damaged" in str(measures.damage(tmp_path / "x", "0" * 64))
    assert measures.damage(tmp_path / "y", right) == "no such file"
    assert "no checksum" in str(measures.damage(tmp_path / "x", None))
