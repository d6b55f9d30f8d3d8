"""What is installed: one package, whose rooms nobody's folders shadow."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import setuptools

from fedsim.attacks.gradvit import GradVit
from fedsim.core.errors import SpecError
from fedsim.core.registry import resolve
from fedsim.defenses.top_k import TopK

ROOT = Path(__file__).parent.parent

MINE = """
from dataclasses import dataclass
import torch
from fedsim.core.attack import Reconstruction

@dataclass
class Grey:
    needs = frozenset({"image_size"})

    def reconstruct(self, view, *, device, progress):
        return Reconstruction(torch.full((1, 3, view.image_size, view.image_size), 0.5))
"""


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """This interpreter in a folder of somebody's, which it looks for modules in first."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "FEDSIM_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def somebodys(tmp_path: Path) -> Path:
    """A working directory with folders of the same names as ours."""
    for room in ("attacks", "defenses", "clients", "experiments"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("")
    (tmp_path / "attacks" / "mine.py").write_text(MINE)
    (tmp_path / "attacks" / "patch_solve.py").write_text("raise RuntimeError('not ours')")
    return tmp_path


def test_one_name_is_taken_in_site_packages() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = setuptools.find_packages(str(ROOT), **settings["packages"]["find"])
    assert {package.split(".")[0] for package in packages} == {"fedsim"}
    assert {"fedsim.attacks.matching", "fedsim.defenses", "fedsim.clients.data"} <= set(packages)


def test_what_is_installed_here_answers_to_one_name(tmp_path: Path) -> None:
    program = (
        "from importlib.util import find_spec\n"
        "names = ('fedsim', 'attacks', 'defenses', 'clients', 'experiments', 'tests')\n"
        "print([name for name in names if find_spec(name)])\n"
    )
    command = [sys.executable, "-I", "-c", program]  # -I: neither this folder nor PYTHONPATH
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "['fedsim']", result.stderr


def test_the_bare_name_of_a_room_is_refused_with_its_new_one() -> None:
    program = (
        "for room in ('attacks', 'defenses', 'clients'):\n"
        "    try:\n"
        "        __import__(room)\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
    )
    result = python(ROOT, "-c", program)
    assert result.stdout.splitlines() == [
        f"import fedsim.{room}: it is a part of fedsim."
        for room in ("attacks", "defenses", "clients")
    ], result.stderr


def test_import_paths_of_older_specs_still_resolve() -> None:
    assert resolve("attack", {}, "attacks.gradvit:GradVit") is GradVit
    assert resolve("defense", {}, "defenses.top_k:TopK") is TopK
    with pytest.raises(SpecError, match="cannot be imported"):
        resolve("attack", {}, "attacks.nowhere:Nothing")
    with pytest.raises(SpecError, match="cannot be imported"):
        resolve("attack", {}, "nowhere.gradvit:GradVit")


def test_what_is_wrong_in_somebodys_own_module_is_not_hidden_by_ours(somebodys: Path) -> None:
    for name in ("dlg", "mine"):
        (somebodys / "attacks" / f"{name}.py").write_text("from attacks import nothere")
    program = (
        "from fedsim.attacks import create_attack\n"
        "for name in ('attacks.dlg:Dlg', 'attacks.mine:Grey'):\n"
        "    try:\n"
        "        print(create_attack(name))\n"
        "    except Exception as error:\n"
        "        print(error)\n"
    )
    lines = python(somebodys, "-c", program).stdout.splitlines()
    assert len(lines) == 2
    assert all("cannot import name 'nothere' from 'attacks'" in line for line in lines)


def test_somebodys_folder_called_attacks_does_not_shadow_ours(somebodys: Path) -> None:
    program = (
        "from fedsim.attacks import create_attack\n"
        "for name in ('patch_solve', 'attacks.mine:Grey', 'attacks.gradvit:GradVit'):\n"
        "    print(type(create_attack(name)).__module__)\n"
    )
    result = python(somebodys, "-c", program)
    assert result.stdout.split() == [
        "fedsim.attacks.patch_solve",
        "attacks.mine",
        "fedsim.attacks.gradvit",
    ], result.stderr


@pytest.mark.slow
def test_nor_does_it_in_a_ray_worker(somebodys: Path) -> None:
    result = python(
        somebodys,
        *("-m", "fedsim.cli", "audit", "-o", "run", "data={image_size: 32, clients: 2}"),
        "model={name: vit_tiny_patch16_224, options: {patch_size: 8, depth: 1}}",
        "attacks=[{name: patch_solve}, {name: 'attacks.mine:Grey'}]",
        "train={rounds: 1, evaluate: false}",
        "engine={kind: ray, cpus: 2}",
    )
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in (somebodys / "run" / "reconstructions").iterdir()) == [
        "Grey",
        "patch_solve",
        "prior_only",
    ]
    assert not list((somebodys / "run").rglob("*.failed.json"))


@pytest.mark.slow
def test_a_wheel_holds_one_package_and_what_it_reads(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(
        ROOT,
        source,
        symlinks=True,
        ignore=shutil.ignore_patterns(".git", ".venv", "runs", "build", "*.egg-info", "tests"),
    )
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), "."]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        packed.extractall(tmp_path / "unpacked")
    assert {name.split("/")[0].split("-")[0] for name in names} == {"fedsim"}
    for needed in (
        "attacks/gradvit.py",
        "clients/data/photos.py",
        "report/template.html",
        "bench/bench.html",
        "viewer/pages/index.html",
    ):
        assert f"fedsim/{needed}" in names
    program = "import fedsim.attacks as a; print(a.__file__); a.create_attack('gias')"
    result = python(tmp_path / "unpacked", "-c", program)
    assert result.stdout.startswith(str(tmp_path)), result.stderr


def test_an_app_that_flower_packed_without_links_finds_its_rooms(tmp_path: Path) -> None:
    for folder in ("fedsim", "attacks", "defenses", "clients"):
        for file in (ROOT / folder).rglob("*"):  # links are not followed, as Flower does
            if file.is_file() and not file.is_symlink() and "__pycache__" not in file.parts:
                target = tmp_path / file.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
    assert not (tmp_path / "fedsim" / "attacks").exists()
    program = "from fedsim.deploy import apps; print(apps.__file__, apps.server, apps.client)"
    result = python(tmp_path, "-c", program)
    assert result.stdout.startswith(str(tmp_path)), result.stderr
