"""The tables of the five papers, in the papers' order: a spec or a script for each."""

from __future__ import annotations

from experiments.papers.kinds import Script, Table


def batch_sizes(spec: str, stem: str, sizes: tuple[int, ...]) -> list[Table]:
    return [
        Table(f"{stem}-batch-{size}", spec, (f"train.batch_size={size}", f"name=batch-{size}"))
        for size in sizes
    ]


def architecture(name: str, options: str) -> Table:
    """GradViT on another network of `experiments/checkpoints`."""
    checkpoint = f"model.checkpoint=experiments/checkpoints/{name}.safetensors"
    changed = (checkpoint, f"model.options={options}", f"name={name}")
    return Table(f"gradvit-3-{name}", "tables/vit_batch.yaml", changed)


def chain(depth: int) -> Table:
    """R-GAP on a plain network of so many convolutions."""
    layers = f"channels: {[12] * depth}, strides: {[1] * depth}, activation: leaky_relu"
    changed = (f"model.options={{{layers}}}", f"name=cnn{depth}")
    return Table(f"gias-a2-cnn{depth}", "gias/rgap_depth.yaml", changed, data="any")


def analytic(name: str, network: str, defenses: str) -> Table:
    """The analytic attack on a network that was trained for MJP's tables."""
    checkpoint = f"{{root}}/{ATTACKED}/vit4-plain/{network}-seed-0-steps-{BRIEF[1]}.safetensors"
    changed = (f"model.checkpoint={checkpoint}", f"defenses={defenses}", f"name={name}")
    return Table(f"mjp-5-{name}", "tables/mjp_trained.yaml", changed, after=(ATTACKED,))


PLAIN_APRIL = "april without its position term"
BRIEF = ("--steps", "1250")
ATTACKED = "mjp-5-networks"
SHUFFLED = "name: mjp, ratio: 0.9, probability: 1.0"
ANALYTIC = [
    analytic("a-plain", "A", "[]"),
    analytic("a-mjp", "J", "[{name: mjp, probability: 0}]"),
    analytic("b-plain", "A", f"[{{{SHUFFLED}, unknown: false, dal: none}}]"),
    analytic("b-mjp", "J", f"[{{{SHUFFLED}}}]"),
    analytic("c-mjp-unhidden", "J", f"[{{{SHUFFLED}, hide: false}}]"),
]
TABLES: list[Table | Script] = [
    Table("gradvit-1-vit", "tables/vit.yaml", against="inverting_gradients"),
    Table("gradvit-1-vit-long", "tables/vit_long.yaml", against="inverting_gradients"),
    Table("gradvit-1-resnet", "tables/resnet.yaml"),
    Table("gradvit-2-terms", "tables/vit_terms.yaml", against="matching and TV"),
    architecture("vit4", "{patch_size: 4, depth: 4, embed_dim: 96}"),
    architecture("vit8", "{patch_size: 8, depth: 6}"),
    architecture("vit8-small", "{patch_size: 8, depth: 4, embed_dim: 96}"),
    Table("gradvit-4-5-layers", "tables/vit_layers.yaml", against="all blocks"),
    *batch_sizes("tables/vit_batch.yaml", "gradvit", (1, 2, 4, 8)),
    Script("gradinversion-1-labels-and-closed-forms", ("closed_forms",)),
    Table("gradinversion-2-terms", "tables/resnet_terms.yaml", against="matching alone"),
    *batch_sizes("tables/resnet_batch.yaml", "gradinversion", (1, 2, 4, 8, 16)),
    Table(
        "gradinversion-3-untrained",
        "tables/resnet_batch.yaml",
        ("model.checkpoint=null", "name=untrained"),
    ),
    *(
        Table(
            f"gradinversion-8-{which}",
            "tables/resnet_batch.yaml",
            ("data.name=imagefolder", f"name={which}"),
            data=which,
        )
        for which in ("largest", "random")
    ),
    Table("april-1-a", "tables/april_a.yaml", against=PLAIN_APRIL),
    Table("april-1-b", "tables/april_b.yaml", against=PLAIN_APRIL),
    Table(
        "april-1-b-longer",
        "tables/april_b.yaml",
        (
            "attacks=[{name: idlg, steps: 1000}, {name: april, steps: 1000, alpha: 0.01}]",
            "name=longer",
        ),
    ),
    Table("april-4-frozen", "tables/april_frozen.yaml"),
    Script(
        "mjp-2-3-vit",
        (*("mjp", "cifar10", "--path", "{path}", "-o", "{folder}"), *BRIEF, "--seeds", "1"),
        "cifar10",
    ),
    *(
        Script(
            f"mjp-1-{network}",
            (
                *("mjp", "cifar10", "--network", network, "--path", "{path}", "-o", "{folder}"),
                *(*BRIEF, "--seeds", "3", "--only", "A", "--only", "E"),
            ),
            "cifar10",
        )
        for network in ("resnet", "swin")
    ),
    Script(
        ATTACKED,
        (
            *("mjp", "cifar10", "--network", "vit4-plain", "--path", "{path}", "-o", "{folder}"),
            *(*BRIEF, "--seeds", "1", "--only", "A", "--only", "J:"),
        ),
        "cifar10",
    ),
    *ANALYTIC,
    Script(
        "mjp-5-inputs",
        ("mjp", "inputs", *(f"{{root}}/{table.name}" for table in ANALYTIC)),
        after=tuple(table.name for table in ANALYTIC),
    ),
    Table("gias-1", "gias/table1.yaml", against="x", data="faces"),
    Table("gias-3-underdetermined", "gias/underdetermined.yaml", against="x", data="faces"),
    *(
        Table(
            f"gias-5-{word}",
            "gias/underdetermined.yaml",
            (change, f"name={word}"),
            against="x",
            data="faces",
        )
        for word, change in (
            ("batch-4", "train.batch_size=4"),
            ("sparse", "defenses=[{name: top_k, sparsity: 0.9}]"),
            ("noise", "defenses=[{name: gaussian_noise, std: 0.3, relative: true}]"),
        )
    ),
    Table("gias-a1-rgap", "gias/rgap.yaml", data="faces"),
    *(chain(depth) for depth in (2, 4, 6, 10)),
    Script("gias-a3-joint", ("joint", "--data", "{path}", "--each", "4"), "faces"),
    Table("giml-6-beta", "gias/giml_beta.yaml", against="z wrong domain", data="domains"),
    Script("gias-a4-speed", ("convergence", "{root}/giml-6-beta"), after=("giml-6-beta",)),
]
