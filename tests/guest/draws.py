"""Draws from the kernel's randomness without a pause, and writes down each draw with both clocks, until FILE.stop
exists. Usage: draws.py FILE"""

import os
import sys
import time

path = sys.argv[1]
with open(path, "w", buffering=1) as file:
    while not os.path.exists(path + ".stop"):
        draw = os.getrandom(16).hex()
        file.write(f"{draw} {time.monotonic_ns()} {time.time_ns()}\n")
        time.sleep(0.002)
