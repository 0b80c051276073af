"""Runs each variant of this folder beside the script that it patches, seeds 1 to 5.

    python benchmark/variants/curves.py                               # half an hour on two cores
    python benchmark/variants/curves.py dynamic_sampling              # only this variant, the others are kept
    python benchmark/variants/curves.py --plot                        # only the figure again, of what is there

A variant is a patch. It is applied to a copy of the scripts in a temporary folder. As many runs at once as there are
cores, of one thread each. Writes curves.json, a run a line, and curves.png.

The figure shows held-out right answers, at temperature 0 where nothing else is said. The originals have the colour of
their algorithm. Four panels show something else, or more:

- The judge of the length penalty pays for long answers, so a panel shows the tokens of a completion.
- Dynamic sampling generates more episodes than it trains on. So it has a second curve, over the generated episodes.
- The KL is needed where a reward is wrong. So this variant and its original are trained on the reward model alone.
- The entropy bonus has a panel for the entropy.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import draw  # noqa: E402
from run import BENCHMARK, ROOT, SCRIPTS, run_all, write_lines  # noqa: E402

HERE = Path(__file__).resolve().parent
RESULT = Path(__file__).with_suffix(".json")
SEEDS = range(1, 6)
EVERY = 8  # iterations from one evaluation to the next
JUDGE = f"--reward {HERE / 'long_judge.py'}:score --eval-reward exact_match"
REWARD_MODEL = (
    f"--reward none --reward-model-path {BENCHMARK / 'default/reward_model'} --eval-reward exact_match"
    " --eval-temperature 1 --scale-rewards none --kl-coef 0.3"
)


class Variant(NamedTuple):
    patch: str
    script: str  # that it patches
    flags: str  # of the variant and of the original
    own_flags: str  # of the variant alone
    label: str  # in the figure


SHORT = "--total-episodes 4096"
VARIANTS = [
    Variant("reinforce_plus_plus", "rloo", SHORT, "--rloo-k 1", "REINFORCE++, k = 1"),
    Variant("sampler_weights", "rloo", SHORT, "", "bfloat16 sampler, weighted"),
    Variant("masked_importance_sampling", "grpo", SHORT, "", "bfloat16 sampler, masked"),
    Variant("overlong_punishment", "grpo", f"--total-episodes 8192 {JUDGE}", "", "GRPO, overlong punished"),
    Variant("dynamic_sampling", "grpo", SHORT, "", "dynamic sampling"),
    Variant("unbiased_kl", "grpo", f"--total-episodes 8192 {REWARD_MODEL}", "", "KL times the ratio"),
    *(Variant("entropy_bonus", script, SHORT, "--entropy-coef 0.3", "with the bonus") for script in SCRIPTS),
]


def all_flags(variant: Variant, where: str, seed: int) -> str:
    """The flags of a run. where: the patch, or `original`"""
    own = "" if where == "original" else variant.own_flags
    return " ".join(f"--seed {seed} --eval-every {EVERY} {variant.flags} {own}".split())


def copy_scripts(folder: Path, patch: str | None = None) -> Path:
    """The three scripts in a folder of their own, patched or as they are, and what their defaults need."""
    folder.mkdir(parents=True)
    for script in SCRIPTS:
        shutil.copy(ROOT / f"{script}.py", folder)
    (folder / "benchmark").symlink_to(BENCHMARK)
    if patch is not None:
        subprocess.run(["git", "apply", str(HERE / f"{patch}.patch")], cwd=folder, check=True)
    return folder


def without_root(flags: str) -> str:
    return flags.replace(f"{ROOT}/", "")


def since_the_last(evaluations: list[dict], rows: list[dict], name: str) -> list[float]:
    """The mean of a metric over the iterations between two evaluations; at the first one, that of iteration 1."""
    values = [row[name] for row in rows[1:]]
    spans = [slice(max(0, row["iteration"] - EVERY), max(1, row["iteration"])) for row in evaluations]
    return [round(float(np.mean(values[span])), 4) for span in spans]


def to_curve(job: tuple, result: dict) -> dict:
    """What is kept of a run: its evaluations, and the means of some metrics between them."""
    rows, script = result["metrics"], Path(job[0])
    evaluations = [row for row in rows if "eval/scores" in row]
    curve = {
        "variant": script.parent.name,
        "script": script.stem,
        "flags": without_root(job[1]),
        "seed": result["args"]["seed"],
        "episode": [row["episode"] for row in evaluations],
        "eval/scores": [round(row["eval/scores"], 4) for row in evaluations],
    }
    for name in ("response_length_mean", "policy/entropy_avg", "objective/kl", "objective/scores"):
        if name in rows[-1]:
            curve[name] = since_the_last(evaluations, rows, name)
    if "generated_episodes" in rows[-1]:
        curve["generated_episodes"] = [row.get("generated_episodes", 0) for row in evaluations]
    for name in ("val/sampler_weight_std", "val/importance_std", "val/masked_fraction"):
        if name in rows[-1]:
            curve[name] = float(f"{np.mean([row[name] for row in rows[1:]]):.4g}")
    return curve


def measure(names: list[str]) -> list[dict]:
    """Run these variants and their originals -> their curves."""
    chosen = [variant for variant in VARIANTS if variant.patch in names]
    with tempfile.TemporaryDirectory() as temporary:
        paths = {name: copy_scripts(Path(temporary) / name, name) for name in names}
        paths["original"] = copy_scripts(Path(temporary) / "original")
        jobs = {}  # two variants of one script with the same flags have one original
        for seed in SEEDS:
            for variant in chosen:
                for where in ("original", variant.patch):
                    jobs[str(paths[where] / f"{variant.script}.py"), all_flags(variant, where, seed)] = None
        return run_all(list(jobs), to_curve)


def identity(curve: dict) -> tuple:
    return curve["variant"], curve["script"], curve["flags"], curve["seed"]


def update_result(names: list[str]):
    """Measure, and put the curves into curves.json, where those of other variants stay."""
    curves = {identity(curve): curve for curve in measure(names)}
    if RESULT.exists():
        curves = {identity(curve): curve for curve in json.loads(RESULT.read_text())} | curves
    write_lines(RESULT, [curves[key] for key in sorted(curves)])


def draw_panel(axis, curves: list[dict], patch: str, metric: str):
    """The mean of the seeds of a variant and of its original, in each script that it patches."""
    variants = [variant for variant in VARIANTS if variant.patch == patch]
    is_one_script = len(variants) == 1
    for variant in variants:
        color = draw.COLORS[variant.script]
        runs = {
            "original": dict(color=color, label=f"{variant.script}.py"),
            patch: dict(color=draw.OTHERS[0], label=variant.label),
        }
        if not is_one_script:
            runs[patch] = dict(color=color, label=None, ls="--")
        for where, style in runs.items():
            some = [c for c in curves if is_run_of(c, variant, where)]
            values = [c[metric] for c in some]
            draw.curve(axis, some[0]["episode"], values, **style)
            ends = [draw.mean_and_band(values)[i][-1] for i in (0, 1)]
            name = f"{patch}, {variant.script}, {where}, {metric}"
            print(f"{name}: {np.mean(values, 0)[0]:.3f} -> {ends[0]:.3f} +- {ends[1]:.3f}")
            if "generated_episodes" in some[0]:
                generated = np.mean([c["generated_episodes"] for c in some], 0)
                label = "over generated episodes"
                axis.plot(generated, np.mean(values, 0), color=style["color"], ls=":", label=label)
    if not is_one_script:
        axis.plot([], [], color=draw.GRAY, ls="--", label=variant.label)


def is_run_of(curve: dict, variant: Variant, where: str) -> bool:
    """Whether a curve is that of the variant, or of its original."""
    flags = without_root(all_flags(variant, where, curve["seed"]))
    return (curve["variant"], curve["script"], curve["flags"]) == (where, variant.script, flags)


def main():
    words = sys.argv[1:]
    if words != ["--plot"]:
        update_result(words or list(dict.fromkeys(variant.patch for variant in VARIANTS)))
    curves = json.loads(RESULT.read_text())
    figure, grid = draw.panels(3, 3, width=3.3, height=2.6)
    panels = {  # of each variant and metric, the title
        ("reinforce_plus_plus", "eval/scores"): "REINFORCE++: right answers",
        ("sampler_weights", "eval/scores"): "sampler weights: right answers",
        ("masked_importance_sampling", "eval/scores"): "masked importance: right answers",
        ("overlong_punishment", "eval/scores"): "a judge of length: right answers",
        ("overlong_punishment", "response_length_mean"): "a judge of length: tokens",
        ("dynamic_sampling", "eval/scores"): "dynamic sampling: right answers",
        ("unbiased_kl", "eval/scores"): "reward model, KL: right, sampled",
        ("entropy_bonus", "eval/scores"): "entropy bonus: right answers",
        ("entropy_bonus", "policy/entropy_avg"): "entropy bonus: entropy of a token",
    }
    for axis, ((patch, metric), title) in zip(grid.flat, panels.items(), strict=True):
        draw_panel(axis, curves, patch, metric)
        draw.in_thousands(axis)
        axis.set_title(title)
        axis.set_ylim(0, {"eval/scores": 1.02, "response_length_mean": 8.2}.get(metric))
        if (patch, metric) != ("overlong_punishment", "eval/scores"):  # its neighbour has the same two
            axis.legend(loc="lower left" if metric == "policy/entropy_avg" else "lower right", frameon=False)
    draw.save(figure, RESULT.with_suffix(".png"))


if __name__ == "__main__":
    main()
