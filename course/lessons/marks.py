"""What our stages' files mark for the lab, and what is shown in the place of an answer."""

import re

# a comment that marks an exercise of `ladder lab` (course/lab/gaps.py), left out of differences
MARKER = re.compile(r"(\s*)(?:#|//) (exercise|step|end of) (\w+)(?:: (.*))?$")
BLANK = "____"  # what a student fills in
