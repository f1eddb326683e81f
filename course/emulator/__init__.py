"""A Hopper GPU in Python, for labs, notebooks and tests; hopper.py says how it works."""

from course.emulator.hopper import CTAS as CTAS
from course.emulator.hopper import Kernel as Kernel
from course.emulator.hopper import Misuse as Misuse
from course.emulator.hopper import Stuck as Stuck
from course.emulator.hopper import emulated as emulated
