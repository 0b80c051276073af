"""One run of benchmark/throughput/scaling.py that watches memory: the peak of every part of an iteration.

    python benchmark/throughput/memory_worker.py JOB.json RESULT.json

The peak of a part is the highest of all iterations. It is counted from the memory that the process had when the part
began for the first time. So it includes what one iteration leaves behind for the next. It works on Linux only: the
kernel knows the peak of a process, and it is set back at the beginning of each part.
"""

import gc
import json
import sys
from pathlib import Path

import tally_worker
from tally_worker import ROLLOUT_PARTS, read_kilobytes


def main(job: dict) -> dict:
    """Run a job -> each part's peak above its first beginning, and the whole run's peak, in GiB."""
    module = tally_worker.load_script(job)
    began, peaks = {}, {}  # KiB

    def begin(part: str):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak, VmHWM, is now what the process has
        began.setdefault(part, read_kilobytes("VmRSS"))

    def end(part: str):
        peaks[part] = max(read_kilobytes("VmHWM"), peaks.get(part, 0))

    def watch(name: str, before=lambda: None, after=lambda: None):
        original = getattr(module, name)

        def watched(*args, **inputs):
            before()
            result = original(*args, **inputs)
            after()
            return result

        setattr(module, name, watched)

    for name, part in ROLLOUT_PARTS.items():
        watch(name, before=lambda part=part: begin(part), after=lambda part=part: end(part))
    watch("draw_mini_batches", before=lambda: begin("train"))  # the first call of the updates
    watch("time_metrics", after=lambda: end("train"))  # the first call after the last update
    seconds = [step["seconds"] for step in tally_worker.measure(module, job)["steps"]]
    parts = {part: (peaks[part] - began[part]) / 2**20 for part in peaks}
    return dict(parts=parts, peak_gib=max(peaks.values()) / 2**20, seconds=seconds)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
