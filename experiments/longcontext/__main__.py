"""python -m experiments.longcontext train|evaluate|export [KEY=VALUE ...]

train     an adapter; goes on where the same folder stopped
evaluate  full attention on the project's tasks, with intervals, against the adapter's card
export    a training's adapter and its model card
Keys and defaults: conf/<command>.yaml beside this file.
"""

import logging
import os
import sys
import time

STARTED = time.monotonic()


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in ("train", "evaluate", "export"):
        print(__doc__, file=sys.stderr)
        return 2
    command, overrides = arguments[0], arguments[1:]
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers are the parallelism
    try:
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException

        from experiments.longcontext.settings import compose

        try:
            config = compose(command, overrides)
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(str(error).partition("\n")[0]) from error
        if command == "train":
            from experiments.longcontext.train import train

            train(config, STARTED)
        elif command == "evaluate":
            from experiments.longcontext.evaluate import evaluate

            print(evaluate(config, STARTED))
        else:
            from experiments.longcontext.export import export

            print(export(config))
    except ValueError as error:
        if "HYDRA_FULL_ERROR" in os.environ:
            raise
        print(f"experiments.longcontext: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where this one stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
