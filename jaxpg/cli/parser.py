"""The arguments of the command line. Only what reading them needs is imported here, so that `--help` is instant."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any, NoReturn

from jaxpg.errors import nearest

LISTS = ("tasks", "algorithms", "options", "environments", "wrappers", "pairs")


class ArgumentParser(argparse.ArgumentParser):
    """A parser that names the nearest valid word when it refuses one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse unknown arguments in the parser of each command, which alone knows the valid ones."""
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
    training, trained = _training_arguments(), _trained_arguments()

    train = commands.add_parser("train", parents=[training], help="train an algorithm on a task")
    train.add_argument("task", metavar="TASK", help="a task (see jaxpg list tasks) or a TOML file")
    train.add_argument("algorithm", metavar="ALGO", help="an algorithm (see jaxpg list algorithms)")

    compare = commands.add_parser("compare", parents=[training], help="train algorithms on a task, and compare them")
    compare.add_argument("task", metavar="TASK")
    compare.add_argument("algorithms", nargs="+", metavar="ALGO")

    sweep = commands.add_parser("sweep", parents=[training], help="train with many settings, and find the best")
    sweep.add_argument("task", metavar="TASK")
    sweep.add_argument("algorithm", metavar="ALGO")
    grid = "values of a setting, or low:high:log:n"
    sweep.add_argument("--grid", nargs="+", required=True, metavar="K=V,V", help=grid)
    sweep.add_argument("--memory", type=float, metavar="GIB", help="limit for all devices together (default: all)")

    evaluate = commands.add_parser("eval", parents=[trained], help="measure a trained policy")
    evaluate.add_argument("--episodes", type=int, default=100, metavar="N", help="per seed (default 100)")

    sample = commands.add_parser("sample", parents=[trained], help="completions of a trained language model")
    _add_sample_arguments(sample)

    play = commands.add_parser("play", parents=[trained], help="draw a trained policy playing an episode")
    play.add_argument("--gif", type=Path, required=True, metavar="FILE", help="where to write")

    plot = commands.add_parser("plot", help="draw the learning curves of runs")
    plot.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    plot.add_argument("--out", type=Path, default=Path("learning_curve.png"), metavar="FILE", help="PNG, SVG or PDF")

    world = commands.add_parser("gridworld", help="a grid world in the browser: planning and learning step by step")
    world.add_argument(
        "--port", type=int, default=8750, metavar="N", help="of 127.0.0.1 (default 8750; 0: any free one)"
    )
    world.add_argument("--no-browser", dest="browser", action="store_false", help="print the address and open nothing")
    world.add_argument("--out", type=Path, metavar="FILE", help="write the page to a file instead of serving it")

    listing = commands.add_parser("list", help="tasks, algorithms and settings, with defaults and meanings")
    listing.add_argument("what", nargs="?", choices=LISTS, metavar="WHAT", help=", ".join(LISTS))
    listing.add_argument("algorithm", nargs="?", metavar="ALGO", help="the algorithm of list options")
    return main


def _training_arguments() -> ArgumentParser:
    """Those of train, compare and sweep."""
    parser = ArgumentParser(add_help=False)
    parser.add_argument("--seeds", type=int, metavar="N", help="how many seeds to train side by side")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the first of them (default 0)")
    parser.add_argument("--set", action="append", default=[], metavar="K=V", help="a setting, such as gamma=0.9")
    parser.add_argument("--steps", type=int, metavar="N", help="environment steps per seed")
    parser.add_argument("--from", dest="initial", metavar="RUN", help="begin with the policy of this run")
    parser.add_argument("--reward", metavar="RUN", help="completions are judged by the reward model of this run")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default runs/...)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    parser.add_argument("--devices", metavar="N|all", help="devices to use (default as many as divide the seeds)")
    parser.add_argument("--mesh", metavar="A=N,A=N", help="how they share the work, such as data=4,seed=2")
    parser.add_argument("--quiet", action="store_true", help="no progress")

    several = parser.add_argument_group(
        "several hosts", "The same command in one process per host, with an --out that all of them see."
    )
    several.add_argument("--distributed", action="store_true", help="this is one process of several")
    several.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0 (default: the cluster's)")
    several.add_argument("--processes", type=int, metavar="N", help="number of processes (default: the cluster's)")
    several.add_argument("--process", type=int, metavar="I", help="number of this one, from 0 (default: the cluster's)")
    seconds = "how long to wait for all of them (default 300)"
    several.add_argument("--join-seconds", type=int, default=300, metavar="N", help=seconds)
    return parser


def _trained_arguments() -> ArgumentParser:
    """Those of eval, sample and play."""
    parser = ArgumentParser(add_help=False)
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of a run")
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best", help="which one (default best)")
    parser.add_argument("--greedy", action="store_true", help="the mode of the policy instead of samples")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the episodes (default 0)")
    return parser


def _add_sample_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", metavar="TEXT", help="what to complete (default: held-out prompts of the task)")
    parser.add_argument("--number", type=int, default=8, metavar="N", help="number of completions (default 8)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="X", help="below 1 for likelier tokens")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="among the K likeliest tokens (0: all)")
    probability = "among the likeliest tokens, up to this probability"
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help=probability)
