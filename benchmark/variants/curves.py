"""Runs each variant of this folder beside the script that it patches, on the default task, seeds 1 to 5.

    python benchmark/variants/curves.py                               # ten to fifteen minutes on two cores
    python benchmark/variants/curves.py --plot                        # only the figure again, of what is there

A variant is a patch. It is applied to a copy of the scripts in a temporary folder. As many runs at once as there are
cores, of one thread each. Writes curves.json, a run a line, and curves.png. The figure shows held-out right answers at
temperature 0. The originals have the colour of their algorithm. The judge of the length penalty pays for long answers,
so there the figure shows the tokens of a completion, too.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import draw  # noqa: E402
from run import BENCHMARK, ROOT, SCRIPTS, run_all, write_lines  # noqa: E402

HERE = Path(__file__).resolve().parent
RESULT = Path(__file__).with_suffix(".json")
SEEDS = range(1, 6)
EVERY = 8  # iterations from one evaluation to the next
JUDGE = f"--reward {HERE / 'long_judge.py'}:score --eval-reward exact_match"
# of each variant the script that it patches, the flags of both, those of the variant, and how the figure calls it
VARIANTS = {
    "reinforce_plus_plus": ("rloo", "--total-episodes 4096", "--rloo-k 1", "REINFORCE++, k = 1"),
    "sampler_weights": ("rloo", "--total-episodes 4096", "", "bfloat16 sampler, weighted"),
    "overlong_punishment": ("grpo", f"--total-episodes 8192 {JUDGE}", "", "GRPO, overlong punished"),
}


def copy_scripts(folder: Path, patch: str | None = None) -> Path:
    """The three scripts in a folder of their own, patched or as they are, and what their defaults need."""
    folder.mkdir(parents=True)
    for script in SCRIPTS:
        shutil.copy(ROOT / f"{script}.py", folder)
    (folder / "benchmark").symlink_to(BENCHMARK)
    if patch is not None:
        subprocess.run(["git", "apply", str(HERE / f"{patch}.patch")], cwd=folder, check=True)
    return folder


def to_curve(job: tuple, result: dict) -> dict:
    """What is kept of a run: its evaluations, and the mean length of the completions between them."""
    rows, script = result["metrics"], Path(job[0])
    lengths = [row["response_length_mean"] for row in rows[1:]]
    evaluations = [row for row in rows if "eval/scores" in row]
    curve = {
        "variant": script.parent.name,
        "script": script.stem,
        "flags": job[1].replace(f"{ROOT}/", ""),
        "seed": result["args"]["seed"],
        "episode": [row["episode"] for row in evaluations],
        "eval/scores": [round(row["eval/scores"], 4) for row in evaluations],
        "response_length_mean": [
            round(float(np.mean(lengths[max(0, row["iteration"] - EVERY) : max(1, row["iteration"])])), 3)
            for row in evaluations
        ],
    }
    weights = [row["val/sampler_weight_std"] for row in rows if "val/sampler_weight_std" in row]
    return curve | ({"val/sampler_weight_std": round(float(np.mean(weights)), 4)} if weights else {})


def measure():
    with tempfile.TemporaryDirectory() as temporary:
        paths = {name: copy_scripts(Path(temporary) / name, name) for name in VARIANTS}
        paths["original"] = copy_scripts(Path(temporary) / "original")
        jobs = {}  # two variants of one script with the same flags have one original
        for seed in SEEDS:
            common = f"--seed {seed} --eval-every {EVERY}"
            for name, (script, flags, own, _) in VARIANTS.items():
                for where, flags_here in (("original", flags), (name, f"{flags} {own}")):
                    jobs[str(paths[where] / f"{script}.py"), " ".join(f"{common} {flags_here}".split())] = None
        curves = run_all(list(jobs), to_curve)
        write_lines(RESULT, sorted(curves, key=lambda curve: (curve["variant"], curve["script"])))


def main():
    if "--plot" not in sys.argv:
        measure()
    curves = json.loads(RESULT.read_text())
    figure, [axes] = draw.panels(1, 4, width=2.9, height=2.7)
    panels = [(name, "eval/scores") for name in VARIANTS] + [("overlong_punishment", "response_length_mean")]
    for axis, (name, metric) in zip(axes, panels, strict=True):
        script, _, _, label = VARIANTS[name]
        for where, color, text in (("original", draw.COLORS[script], f"{script}.py"), (name, draw.OTHERS[0], label)):
            some = [c for c in curves if (c["variant"], c["script"]) == (where, script)]
            values = [c[metric] for c in some]
            draw.curve(axis, some[0]["episode"], values, color, text)
            ends = [draw.mean_and_band(values)[i][-1] for i in (0, 1)]
            print(f"{name}, {where}, {metric}: {np.mean(values, 0)[0]:.3f} -> {ends[0]:.3f} +- {ends[1]:.3f}")
        draw.in_thousands(axis)
        is_score = metric == "eval/scores"
        axis.set_title("held-out right answers" if is_score else "tokens of a completion")
        axis.set_ylim(0, 1.02 if is_score else 8.2)
        if (name, metric) != ("overlong_punishment", "eval/scores"):  # its neighbour has the same two
            axis.legend(loc="lower right", frameon=False)
    draw.save(figure, RESULT.with_suffix(".png"))


if __name__ == "__main__":
    main()
