"""A table of bad inputs by boundary, and what the sentence that refuses each has to name.

Every setting of everything that a config can name is tried with values of other types and outside of its domain. What
is refused leaves one line on stderr, exit code 2 and no file, before anything is compiled (boundary.attempt).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from boundary import attempt

from jaxpg import envs, ladder, values
from jaxpg.errors import UserError
from jaxpg.experiments import config as configs
from jaxpg.experiments import parts
from jaxpg.experiments.config import resolve_config
from jaxpg.experiments.config_file import parse_overrides
from jaxpg.experiments.signatures import Option, check, options
from jaxpg.user_input.domains import ANY, COUNT, DOMAINS, FLOAT32_MAX, INT32_MAX, check_number


def in_two_lanes(cases: Sequence[Any], every: int) -> list[Any]:
    """A sample of the cases in the quick lane, the others in the full one."""
    return [
        case
        if i % every == 0
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full)
        for i, case in enumerate(cases)
    ]


NETWORK_TASKS = {"mlp": "cartpole", "cnn": "breakout", "recurrent": "cartpole", "transformer": "sort"}


def every_setting() -> dict[str, tuple[str, str, dict[str, Any], Option]]:
    """Setting as a config names it -> a task and an algorithm that have it, what must be set beside it, its option."""
    found: dict[str, tuple[str, str, dict[str, Any], Option]] = {}
    for algorithm in configs.ALGORITHMS:
        text = algorithm not in {**ladder.ALGORITHMS, **values.ALGORITHMS}
        needed = {"max_length": 9} if algorithm == "dr_grpo" else {}
        for name, option in configs.algorithm_options(algorithm).items():
            found.setdefault(name, ("sort" if text else "cartpole", algorithm, needed, option))
    for name, option in configs.task_options().items():
        found[name] = ("cartpole", "ppo", {}, option)
    for kind, network in parts.NETWORKS.items():
        for name, option in options(network).items():
            found[f"network.{name}:{kind}"] = (NETWORK_TASKS[kind], "ppo", {"network.kind": kind}, option)
    for table, (source, _) in configs.DATA.items():
        for name, option in options(source).items():
            found[f"{table}.{name}"] = ("sort", "dpo", {}, option)
    return found


SETTINGS = every_setting()
OF_ANOTHER_TYPE = ["2020-01-01", "12:30:00", "[[1]]", "{a = 1}", "['x', 1]"]
NUMBERS = ["nan", "inf", "-inf", "1e400", "9" * 30, "-1e39", "1" + "0" * 400, "0x" + "f" * 9999, "1e-44"]
BAD: Mapping[Any, list[str]] = {
    int: ["0.5", "1e3", "true", "word", "''", *NUMBERS, "4294967296"],
    float: ["true", "word", "''", "[1.0]", *NUMBERS],
    bool: ["0", "1", "'true'", "yes", "1.0", "[]"],
    str: ["1", "true", "nan", "''", "[]", '"\\u0000"', '"a\\nb"', '"\\u001b[31m"'],
    dict: ["1", "true", "word", "nan", "[]", "[{}]"],
}
"""Values that no setting of a type takes."""


def bad_values(option: Option) -> list[str]:
    """What the option must refuse: other types, and numbers on the wrong side of its domain."""
    kinds = [kind for kind in BAD if kind in (option.kind, *getattr(option.kind, "__args__", ()))]
    sequence = not kinds
    (kind,) = kinds or [int]
    given = BAD[kind] + [x for x in OF_ANOTHER_TYPE if kind is not dict or x != "{a = 1}"]
    if kind in (int, float):
        domain = DOMAINS.get(option.name, COUNT)
        given += [f"{domain.low - 1:.17g}"] if domain.low > -FLOAT32_MAX else []
        given += [f"{domain.low:g}"] if domain.above else []
        given += [f"{domain.high:g}"] if domain.below else [f"{domain.high * 2:.17g}"]
    if "_limit" in str(option.default) or kind is int:
        given = [x for x in given if x not in ("total_steps", "time_limit")]
    return [f"[1, {x}]" for x in given] + given + ["1"] if sequence else given


@pytest.mark.parametrize("setting", in_two_lanes(list(SETTINGS), every=6))
def test_a_value_outside_of_a_settings_domain_is_refused_by_its_name(setting: str) -> None:
    task, algorithm, needed, option = SETTINGS[setting]
    name = setting.partition(":")[0]
    for value in bad_values(option):
        if value == "1e-44" and option.kind is not float:
            continue  # an integer is refused as one
        with pytest.raises(UserError) as error:
            resolve_config(task, algorithm, needed | parse_overrides([f"{name}={value}"]))
        sentence = str(error.value)
        assert option.name in sentence, (value, sentence)
        assert len(sentence) < 400, (value, sentence)


def test_the_table_is_long() -> None:
    assert sum(len(bad_values(option)) for *_, option in SETTINGS.values()) > 1000


def test_every_number_has_a_domain() -> None:
    """A float without one would be a COUNT; a domain without a setting is a mistake in typing."""
    named = {option.name: option for *_, option in SETTINGS.values()}
    floats = {n for n, option in named.items() if float in (option.kind, *getattr(option.kind, "__args__", ()))}
    assert floats <= DOMAINS.keys()
    assert DOMAINS.keys() <= named.keys()


@pytest.mark.parametrize("name", DOMAINS)
def test_the_ends_of_a_domain_are_inside_unless_it_says_otherwise(name: str) -> None:
    domain = DOMAINS[name]
    for end, outside in ((domain.low, domain.above), (domain.high, domain.below)):
        if outside:
            with pytest.raises(UserError, match=f"{name} must be (above|below)"):
                check_number(name, end, domain)
        else:
            check_number(name, end, domain)


KNOWN = [
    ("gamma", 1.0001, "gamma must be at most 1, not 1.0001"),
    ("gamma", -0.1, "gamma must be at least 0, not -0.1"),
    ("gae_lambda", 2, "gae_lambda must be at most 1"),
    ("learning_rate", -1e-3, "learning_rate must be at least 0"),
    ("learning_rate", 1e-40, "must be 0 or at least 1.18e-38 in size, or float32 rounds it to 0"),
    ("clip", 1e-40, "clip must be at least 1.18e-38 in size, or float32 rounds it to 0"),
    ("learning_rate", 1e39, "learning_rate must be at most 3.4e38, which float32 can hold"),
    ("max_grad_norm", 0, "max_grad_norm must be above 0, not 0"),
    ("adam_eps", 0.0, "adam_eps must be above 0"),
    ("clip", 0, "clip must be above 0"),
    ("clip", -0.2, "clip must be above 0"),
    ("clip_high", 0.0, "clip_high must be above 0"),
    ("dual_clip", 0.5, "dual_clip must be above 1, not 0.5"),
    ("dual_clip", 1.0, "dual_clip must be above 1"),
    ("value_clip", 0, "value_clip must be above 0"),
    ("target_kl", 0, "target_kl must be above 0"),
    ("num_minibatches", 0, "num_minibatches must be at least 1"),
    ("num_envs", 10**12, "num_envs must be at most 2^31 - 1, not 1000000000000"),
    ("num_steps", True, "num_steps must be an integer or none, not True"),
    ("epochs", 0, "epochs must be at least 1"),
    ("num_envs", INT32_MAX - INT32_MAX % 64, "more than the 2^31 - 1 that a batch can have"),
    ("total_steps", 2**31, "total_steps must be at most 2^31 - 1"),
    ("evaluations", 0, "evaluations must be at least 1"),
    ("seeds", [0, 0], "seeds are different numbers"),
    ("seeds", list(range(2**16 + 1)), "from one to 65,536 of them, not 65,537"),
    ("threshold", float("nan"), "threshold must be finite"),
    ("network.hidden", [True], "hidden must be a list of integers"),
    ("network.initial_log_std", 100.0, "initial_log_std must be at most 20"),
    ("task", "other", "task is an argument of the command, not a setting"),
    ("algorithm", "trpo", "algorithm is an argument of the command, not a setting"),
    ("wrappers.time_limit.steps", True, "time_limit: steps must be a whole number, not True"),
    ("wrappers.frame_stack.num", 10**9, "frame_stack: num must be at most 1000, not"),
    ("environment_settings.gravity", float("inf"), "environment_settings.gravity must be finite"),
    ("environment_settings.max_steps_in_episode", 10**10, "environment_settings.max_steps_in_episode must be at most"),
    ("environment_settings.gravity", "\0", "environment_settings.gravity must be a string of printable characters"),
]


@pytest.mark.parametrize(("name", "value", "words"), in_two_lanes(KNOWN, every=4), ids=lambda x: str(x)[:40])
def test_known_mistakes(name: str, value: Any, words: str) -> None:
    from jaxpg.experiments.build import build

    with pytest.raises(UserError) as error:
        build(resolve_config("cartpole", "ppo", {name: value}))
    assert words in str(error.value)


def test_nothing_is_refused_that_is_inside() -> None:
    """Every default, and a number of any size where no domain is given."""
    for *_, option in SETTINGS.values():
        if option.default is not configs.REQUIRED:
            assert check(option, option.default) == option.default
    for number in (0, 0.0, -1, 2**31 - 1, 1e-30, -1e38, FLOAT32_MAX):
        check_number("x", number, ANY)


ENVIRONMENTS: list[tuple[str, str, Any, str]] = [
    ("sort", "min_length", "word", "min_length must be int or none, not 'word'"),
    ("sort", "min_length", True, "min_length must be int or none, not True"),
    ("sort", "min_length", [1], "min_length must be int or none"),
    ("parity", "max_tokens", "x", "max_tokens must be int or none"),
    ("json_lines", "path", 3, "path must be str or Path, not 3"),
    ("json_lines", "path", True, "path must be str or Path"),
    ("json_lines", "path", ["a"], "path must be str or Path"),
    ("sort", "length", 10**9, "length and min_length must be from"),
    ("sort", "rewards", {"accuracy": "much"}, "the weight of the reward accuracy must be a finite number"),
    ("sort", "letters", 0, "letters must be from 1 to 26"),
]


@pytest.mark.parametrize(("environment", "setting", "value", "words"), in_two_lanes(ENVIRONMENTS, every=4))
def test_settings_of_environments_without_a_telling_default(
    environment: str, setting: str, value: Any, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        envs.make(environment, **{setting: value})


BASE = 'environment = "CartPole-v1"\n'
FILES: list[tuple[str | bytes, str]] = [
    ("", "does not say which environment"),
    (" \n# nothing\n", "does not say which environment"),
    ("environment = ''", "environment must be a non-empty string"),
    ("environment = 3", "environment must be a string, not 3"),
    ("environment = 'CartPole'", "no environment 'CartPole'. Did you mean 'CartPole-v1'"),
    (b"\xff\xfe\x00", "is not valid TOML, which is text in UTF-8"),
    (b"\x89PNG\r\n\x1a\n", "is not valid TOML"),
    (b"\0" * 99, "is not valid TOML"),
    (BASE.encode("utf-16"), "is not valid TOML"),
    ((BASE + "# \u00e9").encode("latin-1"), "is not valid TOML, which is text in UTF-8"),
    (BASE + "= 1", "is not valid TOML"),
    (BASE + "[ppo", "is not valid TOML"),
    (BASE + "total_steps = ", "is not valid TOML"),
    (BASE + "total_steps = 1\ntotal_steps = 2", "is not valid TOML"),
    (BASE + "[ppo]\n[ppo]", "is not valid TOML"),
    (BASE + "network = {kind = 'mlp', kind = 'cnn'}", "is not valid TOML"),
    (BASE + "ppo = 3", "ppo must be a table, not 3"),
    (BASE + "ppo = 'x'", "ppo must be a table, not 'x'"),
    (BASE + "[[ppo]]\ngamma = 1", "ppo must be a table, not [{'gamma': 1}]"),
    (BASE + "ppo = []", "ppo must be a table, not []"),
    (BASE + "x = " + "[" * 5000 + "]" * 5000, "has tables or lists in more than 20 others"),
    (BASE + "x = " + "[" * 50 + "]" * 50, "has tables or lists in more than 20 others"),
    (BASE + "x = " + "{a = " * 900 + "1" + "}" * 900, "has tables or lists in more than 20 others"),
    (BASE + "[" + ".".join("a" * 300) + "]", "has tables or lists in more than 20 others"),
    (BASE + "[environment_settings." + ".".join("a" * 300) + "]", "has tables or lists in more than 20 others"),
    (BASE + "total_steps = " + "9" * 5000, "is not valid TOML"),
    (BASE + "total_steps = 0x" + "f" * 5000, "total_steps must be at most 2^31 - 1, not a value too long to show"),
    (BASE + "total_steps = 1e999", "total_steps must be an integer, not inf"),
    (BASE + "total_steps = true", "total_steps must be an integer, not True"),
    (BASE + "total_steps = 2020-01-01", "total_steps must be an integer, not datetime.date"),
    (BASE + "total_steps = 12:00:00", "total_steps must be an integer"),
    (BASE + "threshold = 2020-01-01T00:00:00Z", "threshold must be a number or none"),
    (BASE + "threshold = true", "threshold must be a number or none, not True"),
    (BASE + "seeds = 3", "seeds must be a list of integers, not 3"),
    (BASE + "seeds = [true, false]", "seeds must be a list of integers"),
    (BASE + "seeds = []", "from one to 65,536 of them, not 0"),
    (BASE + "task = 3", "The name of a task becomes part of"),
    (BASE + "task = ''", "The name of a task becomes part of"),
    (BASE + 'task = "\\u001b[31m"', "The name of a task becomes part of"),
    (BASE + "algorithm = 3", "algorithm must be a string, not 3"),
    (BASE + "network = 'mlp'", "network must be a table, not 'mlp'"),
    (BASE + "network = {kind = 3}", "no kind of network '3'"),
    (BASE + "network = {kind = ['mlp']}", "no kind of network"),
    (BASE + "wrappers = ['flatten']", "wrappers must be a table"),
    (BASE + "wrappers = {flatten = 1}", "wrappers.flatten must be a table, not 1"),
    (BASE + "wrappers = {flaten = {}}", "no wrapper 'flaten'. Did you mean 'flatten'"),
    (BASE + "environment_settings = {gravity = nan}", "environment_settings.gravity must be finite"),
    (BASE + "environment_settings = {gravity = 1979-05-27}", "environment_settings.gravity must be a number, a string"),
    (BASE + "environment_settings = {gravity = true}", "gravity must be like its default"),
    (BASE + "environment_settings = {gravty = 1.0}", "Did you mean 'gravity'"),
    (BASE + "pairs = {slip_rate = 2}", "slip_rate must be at most 1, not 2"),
    (BASE + "[ppo]\nlike = 3", "like must be a string, not 3"),
    (BASE + "[ppo]\nlike = ['grpo']", "like must be a string"),
    (BASE + "[ppo]\nlike = {}", "like must be a string"),
    (BASE + "[ppo]\nlike = 'ppo'", "no section 'ppo' for `like`"),
    (
        BASE + "[ppo]\nlike = 'grpo'\n[grpo]\nlike = 'ppo'",
        "The section grpo has a `like` itself, so it cannot be named for `like` in section ppo, in task.toml. Name one "
        "without, of which there is none.",
    ),
    (
        BASE + "[ppo]\nlike = 'grpo'\n[grpo]\nlike = 'trpo'\n[trpo]\ngamma = 0.9",
        "The section grpo has a `like` itself, so it cannot be named for `like` in section ppo, in task.toml. Name one "
        "without: trpo.",
    ),
    (BASE + "[ppo]\nGamma = 0.9", "no setting 'Gamma' of ppo, in task.toml. Did you mean 'gamma'"),
    (BASE + "[PPO]\ngamma = 0.9", "Did you mean 'ppo'"),
    (BASE + "[ppo]\n'' = 1", "no setting '' of ppo"),
    (BASE + '[ppo]\n"\\u001b[31m" = 1', "no setting '\\x1b[31m' of ppo"),
    (BASE + f"[ppo]\n{'x' * 3000} = 1", "no setting 'xxx"),
    (BASE + "[trpo]\ngamma = nan", "gamma must be finite"),
    (BASE + "[trpo]\nmax_kl = 'small'", "max_kl must be a number, not 'small'"),
    (BASE + "[ppo.network]\nhidden = 3", "hidden must be a list of integers, not 3"),
]


@pytest.mark.parametrize(("content", "words"), in_two_lanes(FILES, every=6), ids=lambda x: repr(x)[:50])
def test_task_files(content: str | bytes, words: str, tmp_path: Path) -> None:
    data = content if isinstance(content, bytes) else content.encode()
    outcome = attempt(["train", "task.toml", "ppo"], tmp_path, {"task.toml": data})
    assert outcome.code == 2
    assert words in outcome.error
    assert len(outcome.error) < 1500


TRAIN = ["train", "cartpole", "ppo"]
SWEEP = ["sweep", "cartpole", "ppo", "--grid"]
COMMANDS: list[tuple[list[str], str]] = [
    (["trian"], "Did you mean 'train'"),
    (["train"], "the following arguments are required: TASK, ALGO"),
    (["train", "cartpole"], "the following arguments are required: ALGO"),
    (["train", "cartpole", "ppo", "grpo"], "unrecognized arguments: grpo"),
    (["compare", "cartpole"], "the following arguments are required: ALGO"),
    (["sweep", "cartpole", "ppo"], "sweep needs --grid"),
    *((["train", task, "ppo"], "TASK must be a name") for task in ("", " ", "\0", "\0.toml", "a\nb")),
    *((["train", task, "ppo"], "There is no task") for task in (".", "..", "/", "../configs/cartpole", "CARTPOL", "*")),
    *((["train", task, "ppo"], "There is no file") for task in ("x.toml", ".toml", "~/x.toml")),
    (["train", "x" * 300 + ".toml", "ppo"], "cannot be read"),
    *((["train", "cartpole", name], "ALGO must be a name") for name in ("", "\x1b[31m")),
    *((["train", "cartpole", name], "There is no algorithm") for name in ("PPO", "../x", "network", "x" * 999)),
    *(([*TRAIN, f"--seeds={x}"], "--seeds must be at least 1") for x in ("0", "-1")),
    *(
        ([*TRAIN, f"--seeds={x}"], "--seeds must be an integer")
        for x in ("", "abc", "1.5", "1e3", "nan", "\u0663", "\xb2")
    ),
    *(([*TRAIN, f"--seeds={x}"], "--seeds must be at most 2^31 - 1") for x in ("10000000000", "9" * 99)),
    ([*TRAIN, "--seeds=2000000000"], "from one to 65,536 of them, not 2,000,000,000"),
    ([*TRAIN, "--seeds=2", f"--seed={INT32_MAX}"], "seeds are different numbers from 0 to 2^31 - 1"),
    ([*TRAIN, "--seeds=--"], "argument --seeds: expected one argument"),
    *(([*TRAIN, f"--seed={x}"], "--seed must be") for x in ("-1", "", "x", "0.0", "10000000000", "9" * 5000)),
    *(
        ([*TRAIN, f"--steps={x}"], "--steps must be")
        for x in ("0", "-5", "", "1e30", "1e6", "nan", "3000000000", "1_0")
    ),
    *(
        ([*TRAIN, f"--devices={x}"], "--devices")
        for x in ("", " ", "0", "-1", "abc", "1.5", "\xb2", "ALL", "--", "9" * 99)
    ),
    ([*TRAIN, "--devices=99"], "--devices 99 takes 99 devices"),
    ([*TRAIN, "--devices=20000"], "A process takes at most 1000 devices, not 20000"),
    ([*TRAIN, "--mesh=data=4000,seed=4000"], "A process takes at most 1000 devices, not 16000000"),
    *(
        ([*TRAIN, f"--mesh={x}"], "--mesh")
        for x in ("", " ", "=", "data", "data=", "data=0", "data=-1", "data=x", "data=1.5")
    ),
    *(
        ([*TRAIN, f"--mesh={x}"], "--mesh")
        for x in ("seed=1,", ",", "data=1,data=1", "shard=1,seed=1", "data=\xb2", "Data=1")
    ),
    *(([*TRAIN, f"--mesh={x}"], "--mesh") for x in ("data=" + "9" * 99, "data=1 seed=1", "data==1", "--", "\0")),
    *(([*TRAIN, f"--out={x}"], "--out must be a name") for x in ("", " ", "\0", "a\nb", "\x1b[31m")),
    *(([*TRAIN, f"--from={x}"], "--from must be a name") for x in ("", "\0", "\n")),
    *(([*TRAIN, f"--from={x}"], "is not the directory of a run") for x in (".", "/", "nowhere", "/dev/null", "~")),
    *(([*TRAIN, f"--reward={x}"], "--reward must be a name") for x in ("", "\0", "\n")),
    *(([*TRAIN, f"--reward={x}"], "is not the directory of a run") for x in (".", "/", "nowhere", "/dev/null")),
    *(([*TRAIN, f"--join-seconds={x}"], "--join-seconds must be") for x in ("0", "-1", "x", "1e3", "10000000000")),
    *(([*TRAIN, f"--processes={x}"], "--processes must be") for x in ("0", "-1", "x")),
    *(([*TRAIN, f"--process={x}"], "--process must be") for x in ("-1", "x", "1.0")),
    ([*TRAIN, "--processes=2"], "--processes is for one of several processes"),
    ([*TRAIN, "--coordinator="], "--coordinator must be a name"),
    ([*TRAIN, "--quiet=1"], "ignored explicit argument '1'"),
    ([*TRAIN, "--resume"], "--resume needs --out"),
    ([*TRAIN, "\x1b[31m"], r"unrecognized arguments: \x1b[31m"),
    # --set
    *(([*TRAIN, f"--set={x}"], "--set takes key=value") for x in ("", "=", "gamma", "=1", " =1", "--gamma")),
    ([*TRAIN, "--set=--"], "argument --set: expected one argument"),
    ([*TRAIN, "--set"], "argument --set: expected one argument"),
    *(
        ([*TRAIN, f"--set=gamma={x}"], "gamma must be a number, not")
        for x in ("", "=1", "1=2", "[0.9]", "{}", "'x", "1e", "07")
    ),
    *(
        ([*TRAIN, f"--set=gamma={x}"], "gamma must be a number, not")
        for x in ("1\nclip = 2", "1\n[x]", "\0", "\x1b", "0.9, 0.8")
    ),
    ([*TRAIN, "--set=gamma.x=1"], "gamma must be a number, not {'x': 1}"),
    *(
        ([*TRAIN, f"--set={x}=1"], "There is no setting")
        for x in (".", "..", ".gamma", "Gamma", "ppo", "[ppo]", "like", "x" * 999)
    ),
    *(
        ([*TRAIN, f"--set={x}=1"], "There is no setting")
        for x in ("network.", "network..hidden", "network.hiden", "\x1b", "ga\nma")
    ),
    ([*TRAIN, "--set=ppo.gamma=0.9"], "There is no setting 'ppo'"),
    ([*TRAIN, "--set=" + ".".join("a" * 999) + "=1"], "has tables or lists in more than 20 others"),
    ([*TRAIN, "--set=gamma=" + "[" * 99 + "]" * 99], "has tables or lists in more than 20 others"),
    *(
        ([*TRAIN, f"--set=network.hidden={x}"], "hidden must be")
        for x in ("[64", "64,64", "[64,'a']", "[1.0]", "[[1]]", "[-1]")
    ),
    *(([*TRAIN, f"--set=environment={x}"], "environment") for x in ("", "x", "3", "true", "a\0b", "[]")),
    *(([*TRAIN, f"--set=initial={x}"], "initial must be") for x in ("3", "''", "[]", "true")),
    *(([*TRAIN, f"--set=anneal_steps={x}"], "anneal_steps must be") for x in ("total_step", "-1", "1.5", "''")),
    # --grid
    *(([*SWEEP, x], "--grid takes name=value,value") for x in ("", "a", "clip", "clip=", "=1", " = ")),
    *(
        ([*SWEEP, f"{x}=1,2"], f"--grid cannot have {x}")
        for x in ("task", "environment", "algorithm", "seeds", "initial", "reward")
    ),
    *(
        ([*SWEEP, f"clip={x}"], "A range is low:high")
        for x in ("0:1:log:3", "-1:1:log:3", "0.1:1:log:0", "0.1:1:log:1")
    ),
    *(
        ([*SWEEP, f"clip={x}"], "A range is low:high")
        for x in ("a:b:log:3", "inf:1:linear:3", "0.1:1:foo:3", "0.1:1:log:1e9")
    ),
    ([*SWEEP, "clip=0.1:1:log:10000000"], "A range is low:high"),
    *(
        ([*SWEEP, f"clip={x}"], "clip must be")
        for x in ("nan", "0.1,nan", "0", "-0.1", "1e400", "true", "[0.1]", "{a=1}")
    ),
    *(
        ([*SWEEP, f"clip={x}"], "clip must be")
        for x in ("1:2", "1:2:log", "0.1:0.2:log:3:4", "0.1,,0.2", ",", "[", "\0")
    ),
    ([*SWEEP, "clip=0.1:1:linear:1000", "gamma=0:1:linear:1000"], "points, and this one has"),
    ([*SWEEP, "clip=[]"], "clip must be"),
    ([*SWEEP, "clip=0.1", "clip=0.2"], "--grid has clip twice"),
    ([*SWEEP, "rewards.length=0,-1"], "cannot have rewards.length: a score is the reward that is trained on"),
    (
        [*SWEEP, "environment_settings.gravity=1:200:linear:200", "clip=0.1,0.2"],
        "at most 128 programs, and this one 200",
    ),
    ([*SWEEP, "clip=0.1,nan", "learning_rate=1e-30:1:log:4900"], "clip must be"),  # thousands of points before it
    ([*SWEEP, "clip=0.1", "--set", "clip=0.2"], "clip is in --grid and is also set to one value"),
    ([*SWEEP, "total_steps=100,200", "--steps=300"], "--grid cannot have total_steps, which is the same in all"),
    ([*SWEEP, "gama=0.1"], "Did you mean 'gamma'"),
    ([*SWEEP, "ppo.clip=0.1,0.2"], "There is no setting 'ppo'"),
    ([*SWEEP, "network.kind=mlp,cnn"], "A cnn reads observations of shape"),
    ([*SWEEP, "num_envs=4,7", "--set=num_minibatches=8", "--set=num_steps=4"], "num_minibatches = 8 does not divide"),
    (["sweep", "sort", "grpo", "--grid", "network.width=32,64"], "which all points share with their first stage sft"),
    (
        ["sweep", "summarise_toy", "dpo", "--set=pairs.sampled_from=sft", "--grid=beta=0.1,0.2"],
        "A sweep samples no pairs",
    ),
    *(
        ([*SWEEP, "clip=0.1", f"--memory={x}"], "--memory must be")
        for x in ("0", "-1", "nan", "inf", "abc", "", "1e400")
    ),
    ([*SWEEP, "clip=0.1", "--resume"], "--resume needs --out"),
    # inspection
    *(
        (["eval", "nowhere", f"--episodes={x}"], "--episodes must be")
        for x in ("0", "-1", "abc", "1e3", "100000000000", "")
    ),
    *((["eval", "nowhere", f"--seed={x}"], "--seed must be") for x in ("-1", "4294967296", "abc", "1.5", "")),
    *(
        (["eval", "nowhere", f"--checkpoint={x}"], "argument --checkpoint: invalid choice")
        for x in ("", "nope", "../x", "\0")
    ),
    *((["sample", "nowhere", f"--number={x}"], "--number must be") for x in ("0", "-1", "abc", "100000000000")),
    *(
        (["sample", "nowhere", f"--temperature={x}"], "--temperature must be")
        for x in ("nan", "inf", "-inf", "0", "-1", "x", "")
    ),
    *((["sample", "nowhere", f"--temperature={x}"], "--temperature must be") for x in ("1e-300", "1e300")),
    *((["sample", "nowhere", f"--top-k={x}"], "--top-k must be") for x in ("-1", "abc", "1.5", "9" * 20)),
    *((["sample", "nowhere", f"--top-p={x}"], "--top-p must be") for x in ("0", "nan", "inf", "-1", "1.1", "abc")),
    *((["play", "nowhere", f"--gif={x}"], "--gif must be a name") for x in ("", " ", "a\0.gif", "a\n.gif")),
    *(
        (["play", "nowhere", f"--gif={x}"], "--gif takes a file that ends in .gif")
        for x in ("x.png", ".", "/", "x.gif.png")
    ),
    (["play", "nowhere"], "the following arguments are required: --gif"),
    *((["plot", "nowhere", f"--out={x}"], "--out must be a name") for x in ("", "\0.png")),
    *(([command, x], "RUN must be a name") for command in ("eval", "sample", "plot") for x in ("", " ", "\0", "\x1b")),
    *(
        ([command, x], "is not the directory of a run")
        for command in ("eval", "sample", "plot")
        for x in (".", "/", "x")
    ),
    *(([command, "/dev/null"], "is not the directory of a run") for command in ("eval", "sample", "plot")),
    (["list", "optionss"], "Did you mean 'options'"),
    (["list", "options"], "list options needs an algorithm"),
    (["list", "options", "pppo"], "Did you mean 'ppo'"),
    (["list", "tasks", "ppo"], "list tasks takes no algorithm"),
    (["list", ""], "argument WHAT: invalid choice"),
]


@pytest.mark.parametrize(("arguments", "words"), in_two_lanes(COMMANDS, every=16), ids=lambda x: repr(x)[:60])
def test_command_lines(arguments: list[str], words: str, tmp_path: Path) -> None:
    outcome = attempt(arguments, tmp_path)
    assert outcome.code == 2
    assert words in outcome.error
    assert "\x1b" not in outcome.error
    assert "\0" not in outcome.error


def test_a_directory_and_a_run_of_its_own_are_no_task_files(tmp_path: Path) -> None:
    (tmp_path / "x.toml").mkdir()
    before = attempt(["train", "x.toml", "ppo"], tmp_path)
    assert (before.code, "cannot be read" in before.error) == (2, True)


def test_the_attempt_would_notice(tmp_path: Path) -> None:
    """What is valid is accepted, so that the table cannot pass by refusing everything."""
    assert attempt([*TRAIN, "--set", "gamma=0.5", "--seeds=2", "--mesh=seed=2"], tmp_path).code is None
    assert attempt([*SWEEP, "clip=0.1,0.2"], tmp_path).code is None
    assert attempt(["list", "tasks"], tmp_path).code == 0
