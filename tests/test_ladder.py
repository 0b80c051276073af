"""benchmark/ladder/: the patch of REINFORCE applies, trains and is taken back. The measured gradients are right."""

import multiprocessing
import shutil
import subprocess

import numpy as np
import pytest
import torch
from conftest import HERE, MODULES, base_flags, command_line, distance, flat, import_file, reset_accelerate, with_group
from conftest import read_jsonl as read
from plain import plain_gradient, token_weights

ladder = import_file(HERE / "benchmark/ladder/ladder.py")
PATCH = HERE / "benchmark/ladder/reinforce.patch"


def test_the_patch_trains_reinforce_and_is_taken_back(run, world, updates, tmp_path):
    """The advantage is the score. The gradient is the mean of -score * grad log p(y)."""
    path = tmp_path / "rloo.py"
    shutil.copy(HERE / "rloo.py", path)
    subprocess.run(["git", "apply", PATCH], cwd=tmp_path, check=True)
    reinforce = import_file(path.rename(tmp_path / "reinforce.py"))
    _, _, folder = run(reinforce, kl_coef=0.0, total_episodes=36)
    rows = [row for row in read(folder / "rollouts.jsonl") if row["iteration"] == 1]
    assert [row["advantage"] for row in rows] == [row["score"] for row in rows]
    expected = plain_gradient(world.llama, rows, token_weights(MODULES["rloo"], rows))
    assert len(updates) == 3 and distance(expected, updates[0].gradients) < 1e-4
    with pytest.raises(ValueError, match="only one update"):
        reinforce.Args(num_ppo_epochs=2)
    (tmp_path / "reinforce.py").rename(path)
    subprocess.run(["git", "apply", "-R", PATCH], cwd=tmp_path, check=True)
    assert path.read_bytes() == (HERE / "rloo.py").read_bytes()


def test_the_measured_gradients_are_right(world, tmp_path):
    """With learning rate 0, both iterations have the gradient of their own completions and of the same weights."""
    rloo = MODULES["rloo"]
    flags = base_flags(world) | dict(kl_coef=0.0, total_episodes=24, learning_rate=0.0)
    words = " ".join(command_line(with_group(rloo, flags)))
    reset_accelerate()
    job = (("rloo", words), str(tmp_path / "gradients.npy"))
    with multiprocessing.get_context("fork").Pool(1) as pool:  # It runs the script in place of its own program.
        rollouts = pool.apply(ladder.record_gradients, [job])["rollouts"]
    for iteration, measured in enumerate(np.load(tmp_path / "gradients.npy"), 1):
        rows = [row for row in rollouts if row["iteration"] == iteration]
        expected = flat(plain_gradient(world.llama, rows, token_weights(rloo, rows)))
        assert (torch.from_numpy(measured) - expected).norm() < 1e-4 * expected.norm()


def test_moments_are_unbiased():
    """Over many tries, the means of both estimates are the true squared length, 0.3, and the true variance, 6.25."""
    noise = np.random.default_rng(0).normal(size=(4000, 8, 4)) * [1, 2, 0.5, 1]
    found = [ladder.moments(gradients @ gradients.T) for gradients in noise + [0.3, -0.2, 0.1, 0.4]]
    assert np.mean(found, 0) == pytest.approx([0.3, 6.25], abs=0.05)
