import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"           # no test may reach the hub; a name that is no folder then fails at once
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
