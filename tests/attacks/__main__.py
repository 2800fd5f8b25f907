"""`python -m attacks` in this folder's parent: attack the old generator, then the library."""

from __future__ import annotations

import time

import numpy as np

from attacks.recover import Layout, halves, recover, tiles
from attacks.victims import NOISE_STD, Step, old_step, real_step
from shuffled_dpsgd.core.noise import LANES


def attack(step: Step, layout: Layout) -> None:
    """Try to predict noise that the attack has not used, and print how well it went."""
    started = time.perf_counter()
    seen, size = step.seen, step.before.size
    found = recover(seen, layout)
    seconds = f"{time.perf_counter() - started:.1f} s"
    if found is None:
        print(f"  no state of the generator explains what was seen (proved in {seconds})")
        return
    others = step.untouched.copy()
    others[found.used] = False
    predicted = found.predict(size)[others]
    worst = NOISE_STD * np.abs(predicted - seen.noise[others]).max()
    print(f"  state recovered in {seconds} from {found.used.size} of {size:,} coordinates:")
    print("  " + " ".join(f"{word:016x}" for word in found.state))
    print(f"  noise of {others.sum():,} others predicted to {worst:.1e}; its std is {NOISE_STD}")


if __name__ == "__main__":
    print("One SGD step with noise from SFC64, the generator until November 2026:", flush=True)
    old = old_step(seed=int(time.time()))[0]
    attack(old, halves(old.before.size))
    print("One SGD step of make_private, default settings, no seed:", flush=True)
    real = real_step()
    attack(real, halves(real.before.size))
    print("The same step, with the words of its noise put together as the library uses them:")
    attack(real, tiles(real.before.size, LANES))
