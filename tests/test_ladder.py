"""benchmark/ladder/: the measured gradients are right. test_patches.py tests its patch."""

import multiprocessing

import numpy as np
import pytest
import torch
from conftest import (
    HERE,
    MODULES,
    base_flags,
    command_line,
    flat,
    import_file,
    reset_accelerate,
    with_group,
)
from plain import plain_gradient, token_weights

ladder = import_file(HERE / "benchmark/ladder/ladder.py")


def test_the_measured_gradients_are_right(world, tmp_path):
    """With learning rate 0, both iterations have the gradient of their own completions and of
    the same weights."""
    rloo = MODULES["rloo"]
    flags = base_flags(world) | dict(kl_coef=0.0, total_episodes=24, learning_rate=0.0)
    words = " ".join(command_line(with_group(rloo, flags)))
    reset_accelerate()
    job = (("rloo", words), str(tmp_path / "gradients.npy"))
    # A process of its own runs the script in place of its own program.
    with multiprocessing.get_context("fork").Pool(1) as pool:
        rollouts = pool.apply(ladder.record_gradients, [job])["rollouts"]
    for iteration, measured in enumerate(np.load(tmp_path / "gradients.npy"), 1):
        rows = [row for row in rollouts if row["iteration"] == iteration]
        expected = flat(plain_gradient(world.llama, rows, token_weights(rloo, rows)))
        assert (torch.from_numpy(measured) - expected).norm() < 1e-4 * expected.norm()


def test_moments_are_unbiased():
    """Over many tries, the means of both estimates are the true squared length, 0.3, and the
    true variance, 6.25."""
    noise = np.random.default_rng(0).normal(size=(4000, 8, 4)) * [1, 2, 0.5, 1]
    found = [ladder.moments(gradients @ gradients.T) for gradients in noise + [0.3, -0.2, 0.1, 0.4]]
    assert np.mean(found, 0) == pytest.approx([0.3, 6.25], abs=0.05)
