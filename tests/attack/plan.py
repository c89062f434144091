"""All attacks, in the order in which they run."""

from tests.attack import damage, disk, hostile, kills, leaks, many, nonsense, operands, ranks, steps
from tests.attack.trials import Attack

ATTACKS: tuple[Attack, ...] = (
    *kills.ATTACKS, *ranks.ATTACKS, *damage.ATTACKS, *disk.ATTACKS, *nonsense.ATTACKS, *operands.ATTACKS,
    *steps.ATTACKS, *leaks.ATTACKS, *many.ATTACKS, *hostile.ATTACKS,
)  # fmt: skip
