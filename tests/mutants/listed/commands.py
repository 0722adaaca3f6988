"""Commands and what is left: one wrong line each."""

from tests.mutants.listed.paths import EVALUATION, INCEPTION, NEMO, OWN_DATA, RANKS, STATUS, VERIFY
from tests.mutants.runner import Mutant

MUTANTS = (
    Mutant(
        "a resolution of NeMo is a level too deep",
        "launch/nemo_keys.py",
        "sorted(sides.index(side) for",
        "sorted(sides.index(side) + 1 for",
        (NEMO,),
    ),
    Mutant(
        "pictograms: a drawing that is as near pushes the one asked for back",
        "launch/pictograms.py",
        "distance_NM < own_N1",
        "distance_NM <= own_N1",
        (RANKS,),
    ),
    Mutant(
        "evaluation: batches of the ranks are put together in another order",
        "launch/measurement.py",
        "of_rank[i % ranks][i // ranks]",
        "of_rank[-1 - i % ranks][i // ranks]",
        (EVALUATION,),
    ),
    Mutant(
        "Inception of FID: the last block averages",
        "dit/evaluation/inception.py",
        '_block_e("max" if kind == FID else "average")',
        '_block_e("average")',
        (INCEPTION,),
    ),
    Mutant(
        "Inception of torchvision: padding does not count",
        "dit/evaluation/inception.py",
        "count_padding = kind == TORCHVISION",
        "count_padding = False",
        (INCEPTION,),
    ),
    Mutant(
        "Inception: pictures are resized by the rule of today",
        "dit/evaluation/inception.py",
        "at = torch.arange(side, dtype=torch.float64) * (size / side)",
        "at = ((torch.arange(side, dtype=torch.float64) + 0.5) * (size / side) - 0.5).clamp(min=0)",
        (INCEPTION,),
    ),
    Mutant(
        "verify: adapters of numbered layers are beside none of the tiny form",
        "dit/verify/tiny.py",
        "targets=[_of_any_layer(target) for target in",
        "targets=[target for target in",
        (VERIFY,),
    ),
    Mutant(
        "own_data: a pack as long as the shortest sample wants it",
        "recipes/own_data.py",
        "longest = max(t * h * w",
        "longest = min(t * h * w",
        (OWN_DATA,),
    ),
    Mutant(
        "status: steps before a rewind count",
        "launch/run_status.py",
        "for later in [known for known in values if known > step]:",
        "for later in [known for known in values if known < 0]:",
        (STATUS,),
    ),
    Mutant(
        "speedrun: a process time that is not reached is confirmed",
        "benchmarks/speedrun.py",
        "found.process_s > SLOWER * claimed.process_s",
        "False",
        ("tests/unit/benchmarks/test_speedrun.py",),
    ),
    Mutant(
        "train.sh: a preempted job uses up its restarts",
        "launch/train.sh",
        "restarts=$(cat",
        "restarts=${SLURM_RESTART_COUNT:-0}$(true",
        ("tests/unit/launch/test_train_script.py",),
    ),
    Mutant(
        "status: steps of an attempt that was killed count",
        "launch/run_status.py",
        "_forget(status, step - 1)",
        "status.times.clear()",
        (STATUS,),
    ),
    Mutant(
        "status: the age of a heartbeat does not matter",
        "launch/run_status.py",
        "self.now - self.beat <= FRESH_S",
        "self.now - self.beat >= 0",
        (STATUS,),
    ),
    Mutant(
        "status: a checkpoint that the run is behind is its step",
        "launch/run_status.py",
        "if published >= began]",
        "if published]",
        (STATUS,),
    ),
)
