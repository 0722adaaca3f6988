"""Commands and what is left: one wrong line each."""

from tests.mutants.listed.paths import (
    DETERMINISTIC,
    ERRORS,
    EVALUATION,
    FOLDER_DAMAGE,
    NEMO,
    OVERRIDES,
    OWN_DATA,
    RANKS,
    RECORDS,
    STATUS,
)
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
        "errors: a message fills a screen",
        "dit/errors.py",
        "if len(short) <= longest:",
        "if len(short) <= longest * 100:",
        (ERRORS,),
    ),
    Mutant(
        "overrides: an empty step of a path is looked up",
        "launch/overrides.py",
        """if any(not step.partition("[")[0] for step in key.split(".")):""",
        """if any(not step for step in key.split(".")):""",
        (OVERRIDES,),
    ),
    Mutant(
        "data: a split may name any number of shards",
        "energon_data/folder.py",
        "return math.prod(ranges) * math.prod(lists)",
        "return math.prod(lists)",
        (FOLDER_DAMAGE,),
    ),
    Mutant(
        "data: offsets beyond what a file can have are read",
        "energon_data/tar_index.py",
        " or offsets[-1] >= 2**63:",
        ":",
        (FOLDER_DAMAGE,),
    ),
    Mutant(
        "records: an overflow passes",
        "dit/checkpoint/records.py",
        "except (ArithmeticError, AttributeError,",
        "except (AttributeError,",
        (RECORDS,),
    ),
    Mutant(
        "deterministic: only a warning",
        "dit/backends/deterministic.py",
        "torch.use_deterministic_algorithms(True)",
        "torch.use_deterministic_algorithms(True, warn_only=True)",
        (DETERMINISTIC,),
    ),
    Mutant(
        "deterministic: cuDNN selects by time",
        "dit/backends/deterministic.py",
        "cudnn.deterministic, cudnn.benchmark = True, False",
        "cudnn.deterministic = True",
        (DETERMINISTIC,),
    ),
)
