"""Plants a bug into a Python process of Spark, at its start: drivers, planners and tasks. Only
clients that run with such a bug have this folder on their path.
"""

from __future__ import annotations

import os

from campaign.bugs.spark import BUGS

next(each for each in BUGS if each.name == os.environ["CAMPAIGN_BUG"]).plant()
