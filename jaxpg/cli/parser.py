"""The command line. Only what reading the arguments needs is imported here, so that `--help` is instant."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any, NoReturn

from jaxpg.errors import nearest

LISTS = ("tasks", "algorithms", "options", "environments", "wrappers", "pairs")


class ArgumentParser(argparse.ArgumentParser):
    """A parser that names the nearest valid word where it refuses one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Each command refuses what it does not know by itself, since only it knows what there is."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        refused = re.match(r"(argument .*: invalid choice|unrecognized arguments): '?([\w-]+)", message)
        if refused:
            _, _, choices = message.partition("(choose from ")
            near = nearest(refused[2], re.findall(r"[\w-]+", choices) or re.findall(r"--[\w-]+", self.format_usage()))
            message += f". Did you mean {near!r}?" if near else ""
        super().error(message)


def make_parser() -> argparse.ArgumentParser:
    """The commands and their arguments."""
    main = ArgumentParser(prog="jaxpg", description="Policy gradients in JAX, from REINFORCE to DAPO.")
    commands = main.add_subparsers(dest="command", required=True, metavar="command")

    training = ArgumentParser(add_help=False)
    training.add_argument("--seeds", type=int, metavar="N", help="how many seeds to train side by side")
    training.add_argument("--seed", type=int, default=0, metavar="N", help="the first of them (default 0)")
    training.add_argument("--set", action="append", default=[], metavar="K=V", help="a setting, such as gamma=0.9")
    training.add_argument("--steps", type=int, metavar="N", help="environment steps per seed")
    training.add_argument("--from", dest="initial", metavar="RUN", help="begin with the policy of this run")
    training.add_argument("--reward", metavar="RUN", help="completions are judged by the reward model of this run")
    training.add_argument("--out", type=Path, metavar="DIR", help="where to write (default runs/...)")
    training.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    training.add_argument("--devices", metavar="N|all", help="devices to use (default as many as divide the seeds)")
    training.add_argument("--mesh", metavar="A=N,A=N", help="how they share the work, such as data=4,seed=2")
    training.add_argument("--quiet", action="store_true", help="no progress")

    several = training.add_argument_group(
        "several hosts", "The same command in one process per host, with an --out that all of them see."
    )
    several.add_argument("--distributed", action="store_true", help="this is one process of several")
    several.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0 (default: as the cluster says)")
    several.add_argument("--processes", type=int, metavar="N", help="how many there are (default: as above)")
    several.add_argument("--process", type=int, metavar="I", help="which one this is, from 0 (default: as above)")
    several.add_argument(
        "--join-seconds", type=int, default=300, metavar="N", help="how long to wait for all of them (default 300)"
    )

    trained = ArgumentParser(add_help=False)
    trained.add_argument("run", type=Path, metavar="RUN", help="the directory of a run")
    trained.add_argument("--checkpoint", choices=("best", "last"), default="best", help="which one (default best)")
    trained.add_argument("--greedy", action="store_true", help="the mode of the policy instead of samples")
    trained.add_argument("--seed", type=int, default=0, metavar="N", help="of the episodes (default 0)")

    train = commands.add_parser("train", parents=[training], help="train an algorithm on a task")
    train.add_argument("task", metavar="TASK", help="a task (see jaxpg list tasks) or a TOML file")
    train.add_argument("algorithm", metavar="ALGO", help="an algorithm (see jaxpg list algorithms)")

    compare = commands.add_parser("compare", parents=[training], help="train algorithms on a task, and compare them")
    compare.add_argument("task", metavar="TASK")
    compare.add_argument("algorithms", nargs="+", metavar="ALGO")

    sweep = commands.add_parser("sweep", parents=[training], help="train with many settings, and find the best")
    sweep.add_argument("task", metavar="TASK")
    sweep.add_argument("algorithm", metavar="ALGO")
    sweep.add_argument(
        "--grid", nargs="+", required=True, metavar="K=V,V", help="values of a setting, or low:high:log:n"
    )
    sweep.add_argument("--memory", type=float, metavar="GIB", help="what all devices may use together (default: all)")

    evaluate = commands.add_parser("eval", parents=[trained], help="measure a trained policy")
    evaluate.add_argument("--episodes", type=int, default=100, metavar="N", help="per seed (default 100)")

    sample = commands.add_parser("sample", parents=[trained], help="completions of a trained language model")
    sample.add_argument("--prompt", metavar="TEXT", help="what to complete (default: held-out prompts of the task)")
    sample.add_argument("--number", type=int, default=8, metavar="N", help="of completions (default 8)")
    sample.add_argument("--temperature", type=float, default=1.0, metavar="X", help="below 1 for likelier tokens")
    sample.add_argument("--top-k", type=int, default=0, metavar="K", help="among the K likeliest tokens (0: all)")
    sample.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="among the likeliest, of this probability"
    )

    play = commands.add_parser("play", parents=[trained], help="draw a trained policy playing an episode")
    play.add_argument("--gif", type=Path, required=True, metavar="FILE", help="where to write")

    plot = commands.add_parser("plot", help="draw the learning curves of runs")
    plot.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    plot.add_argument("--out", type=Path, default=Path("learning_curve.png"), metavar="FILE", help="PNG, SVG or PDF")

    show = commands.add_parser("list", help="what there is, with defaults and meanings")
    show.add_argument("what", nargs="?", choices=LISTS, metavar="WHAT", help=", ".join(LISTS))
    show.add_argument("algorithm", nargs="?", metavar="ALGO", help="whose options")
    return main
