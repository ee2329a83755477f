"""scripts/03_train.py that is gone, as if killed, right after its first checkpoint at step N or later. usage: train_until.py N [arguments of 03_train.py]"""

import os
import runpy
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from aerie.trainer import Trainer  # noqa: E402

last = int(sys.argv.pop(1))
save = Trainer.save


def save_and_go(self: Trainer, seconds: float) -> None:
    save(self, seconds)
    if self.state.step >= last:
        self.group.barrier()
        os._exit(0)


Trainer.save = save_and_go
runpy.run_path(str(SCRIPTS / "03_train.py"), run_name="__main__")
