"""What `fedsim.capture` and `fedsim.witness` cost somebody's own Flower app.

    python experiments/perf/capture_app.py [blocks]

One app in this process, a plain FedAvg over four clients of a ViT-Ti at 224 with eight pictures
each, in short runs that are plain, captured, and captured with witnesses in turn. The first round
of each run, which may carry what is written of the run before, does not count. Prints the median
seconds of a round, and the ratios to the plain one, on the clock and of the processors' time: the
second means something on a machine that has other work, too.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import timm
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch.utils.data import DataLoader, TensorDataset

import fedsim
from fedsim.captures.witness import settle_witnesses
from fedsim.federation.grids import InlineGrid

CLIENTS, PICTURES, BATCH, ROUNDS, SIDE = 4, 8, 8, 4, 224
NAME = "vit_tiny_patch16_224"
WAYS = ("plain", "captured", "captured, with witnesses")


def main(blocks: int) -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for block in range(blocks):
            for way in WAYS if block % 2 == 0 else WAYS[::-1]:
                taken = rounds_of(way, Path(folder) / f"{block}-{WAYS.index(way)}", Path(folder))
                seconds[way] += taken
                print(f"block {block + 1}, {way}: {told(*medians(taken))}", flush=True)
    plain = medians(seconds["plain"])
    for way in WAYS:
        own = medians(seconds[way])
        wall, busy = (one / other for one, other in zip(own, plain, strict=True))
        print(f"{way}: {told(*own)} a round, {wall:.3f} and {busy:.3f} of a plain one")


def medians(taken: list[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(s for s, _ in taken), statistics.median(s for _, s in taken)


def told(seconds: float, busy: float) -> str:
    return f"{seconds:.3f} s ({busy:.3f} s of processors)"


def rounds_of(way: str, root: Path, vaults: Path) -> list[tuple[float, float]]:
    """The seconds of every round of a run but the first, on the clock and of all processors."""
    grid = InlineGrid(client_app(vaults if "witnesses" in way else None), CLIENTS)
    strategy: Any = FedAvg(
        min_train_nodes=CLIENTS, min_available_nodes=CLIENTS, fraction_evaluate=0.0
    )
    if way != "plain":
        strategy = fedsim.capture(strategy, root, model=NAME, image_size=SIDE, classes=10)
    torch.manual_seed(0)
    initial = ArrayRecord(model().state_dict())
    ends: list[tuple[float, float]] = []

    def note(round_: int, arrays: ArrayRecord) -> None:
        ends.append((time.perf_counter(), time.process_time()))

    strategy.start(grid=grid, initial_arrays=initial, num_rounds=ROUNDS, evaluate_fn=note)
    settle_witnesses()
    return [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(ends[1:])]


def model() -> torch.nn.Module:
    made: torch.nn.Module = timm.create_model(NAME, num_classes=10)
    return made


def client_app(vaults: Path | None) -> ClientApp:
    """A client as tutorials write it."""
    app = ClientApp()
    coin = torch.Generator().manual_seed(0)
    levels = torch.randint(0, 256, (PICTURES, 3, SIDE, SIDE), generator=coin)
    data = TensorDataset((levels / 255 - 0.5) / 0.5, torch.arange(PICTURES) % 10)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        network = model()
        network.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        loader: Any = DataLoader(data, batch_size=BATCH, shuffle=True)
        if vaults is not None:
            loader = fedsim.witness(loader, context, vault=vaults)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
        for images, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(images), labels).backward()
            optimizer.step()
        counted = MetricRecord({"num-examples": len(loader.dataset)})
        arrays = ArrayRecord(network.state_dict())
        return Message(RecordDict({"arrays": arrays, "metrics": counted}), reply_to=message)

    return app


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
