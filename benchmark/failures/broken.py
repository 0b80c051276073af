"""Runs a script with some of its functions broken. docs/failures.md shows what happens then.

    python benchmark/failures/broken.py temperature ppo.py  # the script notices, and stops
    # the same without the check that notices
    python benchmark/failures/broken.py temperature no_check ppo.py

First come the names of the breaks, functions of this file that change the script's module. Then
come the script and its flags.
"""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent.parent


def temperature(script):
    """The script samples at temperature 2. Its loss still computes probabilities at --temperature,
    which is 1."""
    generate = script.generate

    def broken(args, sampler, drawn, k, rng, temperature):
        # An evaluation takes the most likely tokens, as before.
        other = 2.0 if temperature > 0 else 0.0
        return generate(args, sampler, drawn, k, rng, other)

    script.generate = broken


def eos_masked(script):
    """The EOS is taken for padding. It is sampled and scored, but it has no gradient."""
    generate = script.generate

    def broken(args, sampler, drawn, k, rng, temperature):
        batch = generate(args, sampler, drawn, k, rng, temperature)
        batch.tokens[batch.tokens == sampler.tokenizer.eos_token_id] = -1
        return batch

    script.generate = broken


def interleaved(script):
    """The completions of a prompt are far apart: a b c a b c, not a a b b c c. A group is still k
    neighbours.

    So a completion is compared with the completions of other prompts. Each reward still belongs to
    its completion.
    """
    generate = script.generate

    def broken(args, sampler, drawn, k, rng, temperature):
        return generate(args, sampler, drawn * k, 1, rng, temperature)  # one completion of each

    script.generate = broken


def no_check(script):
    """Nothing compares the log-probabilities of sampling and training any more. They are only
    logged."""

    def broken(args, difference):
        return {"val/sampling_logprob_difference": difference.abs().max()}

    script.compare_with_sampler = broken


BREAKS = dict(
    temperature=temperature, eos_masked=eos_masked, interleaved=interleaved, no_check=no_check
)


def load(name, breaks):
    """A script as a module, imported anew, with these breaks."""
    spec = importlib.util.spec_from_file_location(f"broken_{name}", ROOT / f"{name}.py")
    script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name in breaks:
        BREAKS[name](script)
    return script


@dataclass
class Options:
    names: tyro.conf.Positional[tuple[str, ...]]
    """of breaks, and then rloo.py, grpo.py or ppo.py, whose flags follow"""


def main(options, flags):
    *breaks, script = options.names
    if not BREAKS.keys() >= {*breaks} or not (ROOT / script).exists():
        raise SystemExit(f"name some of {', '.join(BREAKS)}, and then rloo.py, grpo.py or ppo.py")
    module = load(Path(script).stem, breaks)
    module.main(tyro.cli(module.Args, args=flags, description=module.__doc__))


if __name__ == "__main__":
    main(*tyro.cli(Options, description=__doc__, return_unknown_args=True))
