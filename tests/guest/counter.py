"""Counts for as long as it lives, and says so in a file: `TOKEN PID COUNT`.

The token is drawn at the start and lives in this process's memory only: whoever finds it in the file later, with a
larger count, has found the same process, not a second one. Usage: counter.py FILE
"""

import os
import sys
import time

path = sys.argv[1]
token = os.urandom(8).hex()
count = 0
while True:
    count += 1
    with open(path + ".new", "w") as file:
        file.write(f"{token} {os.getpid()} {count}\n")
    os.rename(path + ".new", path)
    time.sleep(0.25)  # often enough to be seen going on, seldom enough that many emulated guests share two cores
