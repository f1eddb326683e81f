"""Imported first by the fork server: no garbage is looked for while torch is imported.

That is a seventh of the time, for 1 MB. Each child turns the collector on (isolation/child.py).
"""

import gc

gc.disable()
