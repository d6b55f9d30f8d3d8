"""What the attacks recover from models that people bring: small versions, by import path.

    python -m experiments.models [--only NAME ...] [-o DIR]

Audits of three rounds at 32 px, in eval mode, one picture per update, the photos that come with
scikit-image; the first round is left out, in which torchvision's ViT has a head of zeros. PSNR in
dB, the least of four pictures; an exact copy is 160. ``row_space`` attacks a frozen position
embedding, fishing takes one picture out of four, and matching is `inverting_gradients` with 40
steps: its loss in the end as a share of that in the beginning, the largest of four.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedsim.audit.stages import audit
from fedsim.core.attack import Reconstruction
from fedsim.core.errors import FedsimError
from fedsim.core.run import Run
from fedsim.core.spec import Spec, load_spec
from fedsim.lint import lint

_VIT = {"patch_size": 8, "hidden_dim": 96, "num_layers": 2, "num_heads": 4, "mlp_dim": 128}
_HF = {
    **{"patch_size": 8, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    "intermediate_size": 128,
}
_SWIN = {
    **{"patch_size": [4, 4], "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 2]},
    **{"window_size": [4, 4], "stochastic_depth_prob": 0.0},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "timm ViT": ("vit_tiny_patch16_224", {"patch_size": 8, "depth": 2}),
    "torchvision ViT": ("torchvision.models:VisionTransformer", _VIT),
    "torchvision Swin": ("torchvision.models:SwinTransformer", _SWIN),
    "torchvision ResNet-18": ("torchvision.models:resnet18", {}),
    "Hugging Face ViT": ("transformers:ViTForImageClassification", _HF),
    "Hugging Face DeiT, two heads": ("transformers:DeiTForImageClassificationWithTeacher", _HF),
    "tutorial ViT, norms first": ("tests.tutorials:TutorialViT", {"places": 0.02}),
    "tutorial ViT, norms behind": (
        "tests.tutorials:TutorialViT",
        {"places": 0.02, "norm_first": False},
    ),
    "tutorial ViT, positions of zeros": ("tests.tutorials:TutorialViT", {}),
    "hand-written ViT, table of positions": ("tests.tutorials:HandWrittenViT", {}),
    "tutorial CNN": ("tests.tutorials:net_for", {}),
}
FROZEN = "defenses=[{name: frozen_pe}]"
FISHING = [
    "threat=F",
    "server={manoeuvre: {name: fishing}}",
    "train.batch_size=4",
    "data.clients=2",
]
LATE = ["train.rounds=6", "audit.rounds=[6]"]  # for fishing to have read labels
COLUMNS = ("patch_solve", "row_space", "fishing", "labels", "matching", "lint")
NONE = "-"


def spec_of(name: str, attacks: Sequence[dict[str, Any]], *more: str) -> Spec:
    path, options = MODELS[name]
    overrides = [
        "seed=1",
        "data={image_size: 32, clients: 4}",
        f"model={json.dumps({'name': path, 'options': options})}",
        "train={rounds: 3, clients_per_round: 2, lr: 0.05, mode: eval, evaluate: false}",
        "threat=C",
        "audit={rounds: [2, 3]}",
        f"attacks={json.dumps(list(attacks))}",
        "engine={kind: inline, device: cpu}",
    ]
    return load_spec({}, [*overrides, *more])


class Row:
    """One model's row of the table; every cell is an audit of its own."""

    def __init__(self, name: str, folder: Path):
        self.name, self.folder = name, folder / name.replace(" ", "_").replace(",", "")
        self.reasons: list[str] = []

    def cells(self) -> dict[str, str]:
        solved, row_space = {"name": "patch_solve"}, {"name": "row_space"}
        search = {"name": "inverting_gradients", "steps": 40}
        matched = self._run("matching", search)
        return {
            "patch_solve": _least(self._run("patch_solve", solved), "patch_solve"),
            "row_space": _least(self._run("row_space", row_space, FROZEN), "row_space"),
            "fishing": _best(self._run("fishing", solved, *FISHING, *LATE)),
            "labels": _labels(matched),
            "matching": _fall(matched),
            "lint": _certain(self.name),
        }

    def _run(self, what: str, attack: dict[str, Any], *more: str) -> Run | None:
        """The audit; None where it was refused, with the reason kept."""
        try:
            return audit(spec_of(self.name, [attack], *more), self.folder / what)
        except FedsimError as error:
            self.reasons.append(f"{what}: {error}")
            return None


def _scores(run: Run | None, attack: str) -> pd.DataFrame:
    if run is None:
        return pd.DataFrame()
    return run.scores[run.scores["attack"] == attack]


def _least(run: Run | None, attack: str) -> str:
    scores = _scores(run, attack)
    return f"{scores['psnr'].min():.0f}" if len(scores) else NONE


def _best(run: Run | None) -> str:
    """The best picture of each update; the least of those."""
    scores = _scores(run, "patch_solve")
    return f"{scores.groupby('client')['psnr'].max().min():.0f}" if len(scores) else NONE


def _labels(run: Run | None) -> str:
    scores = _scores(run, "inverting_gradients")
    right = int((scores["label_true"] == scores["label_recovered"]).sum()) if len(scores) else 0
    return f"{right} of {len(scores)}" if len(scores) else NONE


def _fall(run: Run | None) -> str:
    if run is None:
        return NONE
    traces = [
        Reconstruction.load(path).trace
        for path in sorted((run.reconstructions / "inverting_gradients").rglob("*.safetensors"))
    ]
    shares = [trace[-1][1] / trace[0][1] for trace in traces if len(trace) > 1]
    return f"{max(shares):.2f}" if shares else NONE


def _certain(name: str) -> str:
    """What lint calls certain of a picture, as it is and with fixed positions."""
    said = []
    for words, more in (("open", []), ("frozen", [FROZEN])):
        try:
            findings = lint(spec_of(name, [{"name": "prior_only"}], *more), trust=True).findings
        except FedsimError:
            continue
        certain = any(f.rule.startswith("exact") and f.severity == "certain" for f in findings)
        said += [words] if certain else []
    return ", ".join(said) or NONE


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    folder = options.output or Path(tempfile.mkdtemp())
    print(f"| model | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}", flush=True)
    reasons = []
    for name in options.only:
        row = Row(name, folder)
        cells = row.cells()
        print(f"| {name} | {' | '.join(cells[column] for column in COLUMNS)} |", flush=True)
        reasons += [f"{name}: {reason}" for reason in row.reasons]
    print("\n" + "\n".join(reasons))


if __name__ == "__main__":
    main()
