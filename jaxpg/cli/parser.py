"""The arguments of the command line. Only what reading them needs is imported here, so that `--help` is instant."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from jaxpg.errors import UserError, excerpt, nearest
from jaxpg.user_input.domains import (
    COUNT,
    COUNT_OR_0,
    FRACTION,
    POSITIVE,
    SAMPLING_TEMPERATURE,
    SHARE,
    Domain,
    check_number,
)
from jaxpg.user_input.printable import printable

LISTS = ("tasks", "algorithms", "options", "environments", "wrappers", "pairs", "step_labels", "demonstrations")
SETTINGS = ("--set", "--seeds", "--seed", "--from", "--reward", "--grid")
"""What states settings, which resume takes from the directory."""

EXAMPLES = """examples:
  jaxpg train cartpole ppo --seeds 8 --out runs/ppo    train eight agents, with a curve and a checkpoint
  jaxpg play runs/ppo --gif ppo.gif                    look at the best of them
  jaxpg show cartpole ppo                              what would be trained: settings, shapes, memory

jaxpg COMMAND --help explains a command; jaxpg list shows tasks and algorithms."""


class ArgumentParser(argparse.ArgumentParser):
    """A parser that raises a UserError for what it refuses, and names the nearest valid word."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse unknown arguments in the parser of each command, which alone knows the valid ones."""
        for argument in sys.argv[1:] if args is None else args:
            if re.fullmatch("--[a-z-]+=--", argument):  # argparse would take it for an empty list
                self.error(f"argument {argument[:-3]}: expected one argument")
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def _print_message(self, message: str, file: Any = None) -> None:
        """Help and version; argparse itself passes over a disk that is full."""
        if message:
            print(message, end="", file=file or sys.stderr)

    def error(self, message: str) -> NoReturn:
        refused = re.match(r"(argument .*: invalid choice|unrecognized arguments): '?([\w-]+)", message)
        if refused and refused[2] in SETTINGS and self.prog.endswith(" resume"):
            raise UserError(
                "resume takes its settings from the directory, and of them only --steps may change: leave out "
                f"{refused[2]}. For other settings train a new run."
            )
        if refused:
            _, _, choices = message.partition("(choose from ")
            near = nearest(refused[2], re.findall(r"[\w-]+", choices) or re.findall(r"--[\w-]+", self.format_usage()))
            if near:
                raise UserError(f"{message}. Did you mean {near!r}?")
        of_a_value = re.match(r"argument (\S+): (must .*)", message, re.DOTALL)
        raise UserError(f"{of_a_value[1]} {of_a_value[2]}" if of_a_value else f"{message}. See {self.prog} --help.")


def integer(domain: Domain) -> Callable[[str], int]:
    """The reader of an argument that is an integer of this domain."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,100}", text):
            raise argparse.ArgumentTypeError(f"must be an integer, not {excerpt(text)}.")
        return _in_domain(int(text), domain)

    return read


def number(domain: Domain) -> Callable[[str], float]:
    """The reader of an argument that is a number of this domain."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number, not {excerpt(text)}.") from None
        return _in_domain(value, domain)

    return read


def _in_domain(value: Any, domain: Domain) -> Any:
    try:
        check_number("", value, domain)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error).strip()) from None
    return value


count = integer(COUNT)
count_or_0 = integer(COUNT_OR_0)
positive = number(POSITIVE)
share = number(SHARE)
share_or_0 = number(FRACTION)
episodes = integer(Domain(1, 10**6))  # all side by side, as are completions
completions = integer(Domain(1, 10**5))


def temperature(text: str) -> float:
    """The reader of a temperature, which is 0 elsewhere where tokens are not sampled."""
    value = number(Domain())(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be above 0: --greedy always takes the most likely token.")
    return _in_domain(value, SAMPLING_TEMPERATURE)


def name(text: str) -> str:
    """The reader of a name or a path."""
    if not text.strip() or printable(text) != text:
        raise argparse.ArgumentTypeError(f"must be a name of printable characters, not {excerpt(text)}.")
    return text


def path(text: str) -> Path:
    """The reader of a path, see `name`."""
    return Path(name(text))


def make_parser() -> argparse.ArgumentParser:
    """The commands and their arguments."""
    main = ArgumentParser(
        prog="jaxpg",
        description="Policy gradients in JAX, from REINFORCE to DAPO.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    main.add_argument("--version", action="version", version=f"jaxpg {_version()}")
    commands = main.add_subparsers(dest="command", metavar="command")

    _add_training_commands(commands)
    _add_run_commands(commands)
    _add_other_commands(commands)
    return main


def command_words(commands: Mapping[str, argparse.ArgumentParser]) -> dict[str, list[str]]:
    """The options of every command, for a shell that completes them."""
    return {name: sorted(set(re.findall(r"--[a-z-]+", parser.format_help()))) for name, parser in commands.items()}


def _add_training_commands(commands: Any) -> None:
    """The commands that train: train, compare, sweep, resume; and show, which says what they would train."""
    training = _training_arguments()
    train = commands.add_parser("train", parents=[training], help="train an algorithm on a task")
    task, algorithm = "a task (see jaxpg list), a TOML file, or brax:ant", "an algorithm, see jaxpg list algorithms"
    train.add_argument("task", type=name, metavar="TASK", help=task)
    train.add_argument(
        "algorithms", type=name, nargs=1, metavar="ALGO", help="an algorithm (see jaxpg list), or a stage of the task"
    )

    compare = commands.add_parser("compare", parents=[training], help="train algorithms on a task, and compare them")
    compare.add_argument("task", type=name, metavar="TASK", help=task)
    compare.add_argument("algorithms", type=name, nargs="+", metavar="ALGO", help=algorithm)

    sweep = commands.add_parser(
        "sweep", parents=[_training_arguments(sweeps=True)], help="train with many settings, and find the best"
    )
    sweep.add_argument("task", type=name, metavar="TASK", help=task)
    sweep.add_argument("algorithms", type=name, nargs=1, metavar="ALGO", help=algorithm)
    grid = "values of a setting, or low:high:log:n (no default)"
    sweep.add_argument("--grid", nargs="+", action="extend", metavar="K=V,V", help=grid)
    sweep.add_argument("--memory", type=positive, metavar="GIB", help="limit for all devices together (default: all)")

    show = commands.add_parser("show", help="print the settings, shapes and memory without training")
    show.add_argument("task", type=name, metavar="TASK", help=task)
    show.add_argument("algorithms", type=name, nargs=1, metavar="ALGO", help=algorithm)
    _add_setting_arguments(show)
    show.add_argument("--time", action="store_true", help="compile, train two iterations, and say how long it takes")
    _add_trust_argument(show)

    resume = commands.add_parser("resume", help="continue a train, compare or sweep that was stopped")
    _add_resume_arguments(resume)


def _add_run_commands(commands: Any) -> None:
    """The commands that look at runs: eval, sample, play, export, plot."""
    trained = _trained_arguments()
    evaluate = commands.add_parser("eval", parents=[trained], help="measure a trained policy")
    _add_greedy_argument(evaluate)
    evaluate.add_argument("--episodes", type=episodes, default=100, metavar="N", help="per seed (default 100)")
    evaluate.add_argument(
        "--samples", type=count, metavar="N", help="completions per prompt (default evaluation_samples of the config)"
    )
    evaluate.add_argument(
        "--reward",
        type=name,
        metavar="RUN",
        help="also report best of N and weighted majority by this reward model (default: none)",
    )

    sample = commands.add_parser("sample", parents=[trained], help="completions of a trained language model")
    _add_seed_index_argument(sample)
    sample.add_argument("--greedy", action="store_true", help="take the most likely token instead of sampling")
    _add_sample_arguments(sample)

    play = commands.add_parser("play", parents=[trained], help="draw a trained policy playing an episode")
    _add_greedy_argument(play)
    _add_seed_index_argument(play)
    play.add_argument("--gif", type=path, required=True, metavar="FILE", help="where to write")

    export = commands.add_parser("export", help="metrics as CSV, and a policy that runs without jaxpg")
    export.add_argument("run", type=path, metavar="RUN", help="the directory of a run")
    export.add_argument("--out", type=path, metavar="DIR", help="where to write (default RUN/export)")
    _add_checkpoint_argument(export)
    _add_seed_index_argument(export)
    _add_trust_argument(export)

    plot = commands.add_parser("plot", help="draw the learning curves of runs")
    plot.add_argument("runs", type=path, nargs="+", metavar="RUN", help="directories of runs, or of compare")
    plot.add_argument(
        "--out",
        type=path,
        default=Path("learning_curve.png"),
        metavar="FILE",
        help="PNG, SVG or PDF (default learning_curve.png)",
    )


def _add_other_commands(commands: Any) -> None:
    """The commands that need no run: plan, gridworld, check, completion, list."""
    plan = commands.add_parser("plan", help="solve a known MDP: optimal values and policy")
    _add_plan_arguments(plan)

    world = commands.add_parser("gridworld", help="a grid world in the browser: planning and learning step by step")
    world.add_argument(
        "--port", type=int, default=8750, metavar="N", help="of 127.0.0.1 (default 8750; 0: any free one)"
    )
    world.add_argument("--no-browser", dest="browser", action="store_false", help="print the address and open nothing")
    world.add_argument("--out", type=path, metavar="FILE", help="write the page to a file (default: serve it)")

    check = commands.add_parser("check", help="look for mistakes in an environment")
    check.add_argument("environment", type=name, metavar="ENV", help="module:function of your own, brax:ant, ...")
    check.add_argument("--set", action="append", default=[], metavar="K=V", help="one of its settings (default: none)")
    _add_trust_argument(check)

    completion = commands.add_parser("completion", help="a script with which a shell completes commands and names")
    completion.add_argument("shell", choices=("bash", "zsh"), help='eval "$(jaxpg completion bash)" in ~/.bashrc')

    completion.set_defaults(words=lambda: command_words(commands.choices))

    listing = commands.add_parser("list", help="tasks, algorithms and settings, with defaults and meanings")
    listing.add_argument("what", nargs="?", choices=LISTS, metavar="WHAT", help=", ".join(LISTS))
    listing.add_argument(
        "of", nargs="?", type=name, metavar="ALGO", help="an algorithm for list options, a suite for list environments"
    )


def _version() -> str:
    try:
        return metadata.version("jaxpg")
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return "of a checkout that is not installed"


def _training_arguments(*, sweeps: bool = False) -> ArgumentParser:
    """Those of train, compare and sweep."""
    parser = ArgumentParser(add_help=False)
    _add_setting_arguments(parser)
    parser.add_argument("--out", type=path, metavar="DIR", help="where to write (default runs/...)")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out, or start it")
    parser.set_defaults(grid=None, memory=None)
    devices, over = ("all", "the runs") if sweeps else ("as many as divide the seeds", "the seeds")
    _add_machine_arguments(parser, sweeps=sweeps, devices=devices, mesh=f"over {over}")
    return parser


def _add_setting_arguments(parser: argparse.ArgumentParser) -> None:
    """What wins over the settings of a task."""
    parser.add_argument(
        "--seeds", type=count, metavar="N", help="number of seeds, trained in parallel (default: the task's)"
    )
    parser.add_argument("--seed", type=count_or_0, metavar="N", help="number of the first seed (default: the task's)")
    parser.add_argument("--set", action="append", default=[], metavar="K=V", help="such as gamma=0.9 (default: none)")
    parser.add_argument("--steps", type=count, metavar="N", help="environment steps per seed (default: the task's)")
    parser.add_argument(
        "--from", type=name, dest="initial", metavar="RUN", help="start from the policy of this run (default: none)"
    )
    parser.add_argument(
        "--reward", type=name, metavar="RUN", help="use the reward model of this run as the reward (default: none)"
    )


def _add_resume_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of resume; what else train, compare and sweep take is in the directory."""
    parser.add_argument("out", type=path, metavar="DIR", help="the --out of the command")
    parser.add_argument("--steps", type=count, metavar="N", help="environment steps per seed (default: as begun)")
    parser.set_defaults(resume=True, task=None, algorithms=[], grid=None, memory=None)
    parser.set_defaults(set=[], seeds=None, seed=None, initial=None, reward=None)
    _add_machine_arguments(parser, devices="those of the command", mesh="that of the command")


def _add_machine_arguments(parser: argparse.ArgumentParser, *, sweeps: bool = False, devices: str, mesh: str) -> None:
    """What a command that trains runs on; `devices` and `mesh` are the defaults, in words.

    A sweep is one process and has no loggers: its help does not show those options, and it refuses them.
    """

    def shown(text: str) -> str:
        return argparse.SUPPRESS if sweeps else text

    parser.add_argument("--devices", type=name, metavar="N|all", help=f"devices to use (default: {devices})")
    parser.add_argument(
        "--mesh", type=name, metavar="A=N,A=N", help=f"device mesh, such as data=4,seed=2 (default: {mesh})"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    too = shown("also log to Weights & Biases")
    parser.add_argument("--wandb", dest="loggers", action="append_const", const="wandb", help=too)
    detailed = shown("log each seed, the settings and completions to TensorBoard, too (default: means over seeds)")
    parser.add_argument("--tensorboard", dest="loggers", action="append_const", const="tensorboard", help=detailed)
    _add_trust_argument(parser)

    together = "The same command in one process per host, with an --out that all of them see."
    several = parser.add_argument_group("several hosts", None if sweeps else together)
    several.add_argument("--distributed", action="store_true", help=shown("this is one process of several"))
    address = shown("address of process 0 (default: the cluster's)")
    several.add_argument("--coordinator", type=name, metavar="HOST:PORT", help=address)
    number_of = shown("number of processes (default: the cluster's)")
    several.add_argument("--processes", type=count, metavar="N", help=number_of)
    this = shown("number of this one, from 0 (default: the cluster's)")
    several.add_argument("--process", type=count_or_0, metavar="I", help=this)
    seconds = shown("how long to wait for all of them (default 300)")
    several.add_argument("--join-seconds", type=count, metavar="N", help=seconds)


def _trained_arguments() -> ArgumentParser:
    """Those of eval, sample and play."""
    parser = ArgumentParser(add_help=False)
    parser.add_argument("run", type=path, metavar="RUN", help="the directory of a run")
    _add_checkpoint_argument(parser)
    parser.add_argument("--seed", type=count_or_0, default=0, metavar="N", help="seed of the episodes (default 0)")
    _add_trust_argument(parser)
    return parser


def _add_greedy_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--greedy",
        action=argparse.BooleanOptionalAction,
        help="take the most likely action, or sample (default: as the run's own evaluations)",
    )


def _add_checkpoint_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", choices=("best", "last"), default="best", help="checkpoint to load (default best)"
    )


def _add_seed_index_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed-index", type=count_or_0, metavar="I", help="which seed, from 0 (default: the best)")


def _add_trust_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trust-code", action="store_true", help="allow importing the user code that a run refers to")


def _add_plan_arguments(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("task", type=name, metavar="TASK", help="such as frozen_lake, or a TOML file")
    plan.add_argument("--gamma", type=share_or_0, default=0.99, metavar="X", help="the discount (default 0.99)")
    plan.add_argument(
        "--tolerance", type=positive, default=1e-6, metavar="X", help="error of the values, at most (default 1e-6)"
    )
    plan.add_argument(
        "--set", action="append", default=[], metavar="K=V", help="environment_settings.slip=0.1, ... (default: none)"
    )
    plan.add_argument("--out", type=path, metavar="FILE", help="the picture: PNG, SVG or PDF (default plan.png)")


def _add_sample_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", metavar="TEXT", help="what to complete (default: held-out prompts of the task)")
    parser.add_argument(
        "--number",
        type=completions,
        default=8,
        metavar="N",
        help="number of completions (default 8); with --out, of each prompt",
    )
    parser.add_argument("--out", type=path, metavar="FILE", help="write training data, .jsonl (default: print)")
    parser.add_argument("--prompts", type=completions, metavar="N", help="with --out, number of prompts (default 256)")
    parser.add_argument(
        "--only",
        choices=("right", "ended", "all"),
        metavar="WHICH",
        help="with --out, the completions that are right, those that have ended (default), or all",
    )
    parser.add_argument(
        "--temperature", type=temperature, default=1.0, metavar="X", help="lower for likelier tokens (default 1)"
    )
    parser.add_argument(
        "--top-k", type=count_or_0, default=0, metavar="K", help="among the K likeliest tokens (default 0: all)"
    )
    probability = "among the likeliest tokens, up to this probability (default 1)"
    parser.add_argument("--top-p", type=share, default=1.0, metavar="P", help=probability)
