"""The commands that make a run: what comes back, and the exit code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedsim.core.run import Run, list_observations
from tests.conftest import SMALL


def test_an_audit_ends_with_the_path_of_its_report(run_cli, tmp_path: Path) -> None:
    code, out, _ = run_cli("audit", "-o", tmp_path / "run", *SMALL, "audit.victims=1")
    assert code == 0
    assert out.strip().endswith(f"report: {tmp_path / 'run' / 'report.html'}")
    assert "LEAKS" in out


def test_json_is_all_that_is_printed(run_cli, tmp_path: Path) -> None:
    code, out, _ = run_cli("audit", "-o", tmp_path / "run", "--json", *SMALL, "audit.victims=1")
    assert code == 0
    assert json.loads(out)["verdicts"][0]["verdict"] == "LEAKS"
    code, out, _ = run_cli("run", "-o", tmp_path / "rounds", "--json", *SMALL)
    assert len(json.loads(out)["rounds"]) == 2


def test_resume_takes_the_spec_from_the_directory(run_cli, tmp_path: Path) -> None:
    run_cli("run", "-o", tmp_path / "run", *SMALL)
    code, out, _ = run_cli("audit", "--resume", tmp_path / "run")
    assert code == 0
    assert "LEAKS" in out
    code, _, err = run_cli("audit", "--resume", tmp_path / "run", "train.rounds=9")
    assert code == 2
    assert "--resume takes the directory alone" in err


def test_an_attack_is_replayed_offline(run_cli, small_run: Run, tmp_path: Path) -> None:
    path = list_observations(small_run.observations)[0]
    words = ("attack", path, "--attack", "patch_solve", "-o", tmp_path, "--json")
    code, out, _ = run_cli(*words, "snap=false")
    assert code == 0
    (row,) = json.loads(out)
    assert 80 < row["psnr"][0] < 160
    assert Path(row["picture"]).is_file()


def test_a_damaged_observation_offline_is_an_error(run_cli, small_run: Run, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(small_run.observations, tmp_path / "o" / "observations")
    path = list_observations(tmp_path / "o" / "observations")[0]
    path.with_suffix(".safetensors").write_bytes(b"short")
    code, _, err = run_cli("attack", path, "--attack", "patch_solve")
    assert code == 1
    assert "damaged" in err


def test_a_threat_model_binds_offline_too(run_cli, small_run: Run) -> None:
    path = list_observations(small_run.observations)[0]
    code, _, err = run_cli("attack", path, "--attack", "patch_solve", "--threat", "A")
    assert code == 1
    assert "does not grant" in err


def test_crashed_jobs_show_in_the_exit_code(run_cli, tmp_path: Path) -> None:
    attacks = "attacks=[{name: 'tests.faults:Crashes'}, {name: patch_solve}]"
    code, out, err = run_cli("audit", "-o", tmp_path / "run", *SMALL, attacks, "audit.victims=1")
    assert code == 3
    assert "LEAKS" in out
    assert "ZeroDivisionError" in err


def test_a_truncated_jpeg_is_skipped_counted_and_told(run_cli, tmp_path: Path) -> None:
    from PIL import Image

    from fedsim.clients.data.datasets import load_images
    from fedsim.core.spec import DataSpec

    photos = load_images(DataSpec(image_size=64), "train")
    for index in range(24):
        folder = tmp_path / "tree" / f"class{index % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = (photos.image(index * 20) * 255).byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(folder / f"{index}.jpg")
    broken = tmp_path / "tree" / "class0" / "0.jpg"
    broken.write_bytes(broken.read_bytes()[:400])
    data = ["data.name=imagefolder", f"data.path={tmp_path / 'tree'}", "train.evaluate=true"]
    code, out, err = run_cli("audit", "-o", tmp_path / "run", *SMALL, *data)
    assert code == 0
    assert "LEAKS" in out
    assert "1 damaged picture was skipped" in err


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_can_be_resumed(kind: signal.Signals, tmp_path: Path) -> None:
    slow = "attacks=[{name: patch_solve}, {name: inverting_gradients, steps: 100000}]"
    words = [*SMALL, slow, "audit.victims=1"]
    command = [sys.executable, "-m", "fedsim.cli", "audit", "-o", str(tmp_path / "run"), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    found = tmp_path / "run" / "reconstructions" / "patch_solve"
    deadline = time.monotonic() + 120
    while not list(found.rglob("*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(1)
    process.send_signal(kind)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + kind
    assert "--resume" in err
    assert "Traceback" not in err
    run = Run.open(tmp_path / "run")
    assert len(run.rounds) == 2
    assert len(list(found.rglob("*.safetensors"))) == 1


@pytest.mark.parametrize(
    ("parameter", "words"),
    [("steps=[1", "not valid YAML"), ("title=[1]", "title"), ("steps", "write key=value")],
)
def test_a_bad_parameter_of_an_attack_is_one_sentence(
    run_cli, small_run: Run, parameter: str, words: str
) -> None:
    observation = list_observations(small_run.observations)[0]
    code, _, told = run_cli("attack", observation, parameter, "--attack", "patch_solve")
    assert code == 2
    assert words in told
    assert "Traceback" not in told
