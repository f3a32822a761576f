"""Records which calls accelerate's trackers make: python record_trackers.py, where accelerate is.

None of the libraries that they write to is needed: stand-ins take the calls (`trackers_program.py`).
"""

import json
from pathlib import Path

import trackers_program

if __name__ == "__main__":
    path = Path(__file__).with_name("recorded_trackers.json")
    path.write_text(json.dumps(trackers_program.run_all(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
