"""A hundred wrong uses of fit, load, act, export, show, parts, callbacks and loggers: a sentence, no traceback.

Nothing is trained or written: each is refused before.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from refusals import refused

import jaxpg
from jaxpg import ladder, networks, values
from jaxpg.errors import UserError
from jaxpg.objectives import surrogates
from jaxpg.rollout import make_actor
from jaxpg.runs import Callback, MetricsTable, TrainedPolicy, callbacks, fitting, loggers
from jaxpg.types import Env, Learner


def no_settings(rate: float) -> Any:
    """A part whose argument has no default and is not keyword-only."""
    return rate


def stumbles() -> Any:
    raise ValueError("no such luck")


def three() -> int:
    return 3


def whole(*, num_envs: int = 8) -> Any:
    """PPO with a loss of whole episodes, on segments."""
    return ladder.ppo(num_envs=num_envs)._replace(surrogate=surrogates.PerEpisode(surrogates.importance_ratio))


HERE = __name__
NOT_AN_ENV: Any = 3
fit = partial(jaxpg.fit, total_steps=100, progress=False)
cartpole = partial(fit, "cartpole", "ppo")
FITS: dict[str, tuple[Callable[[], Any], str]] = {
    "no such task": (lambda: fit("cartpol", "ppo"), "Did you mean 'cartpole'"),
    "an empty task": (lambda: fit("", "ppo"), "task"),
    "a task that is a number": (lambda: fit(NOT_AN_ENV, "ppo"), "environment"),
    "a task that is none": (lambda: fit(None, "ppo"), "environment"),
    "a task file that is not there": (lambda: fit("nowhere.toml", "ppo"), "nowhere.toml"),
    "a folder as a task": (lambda: fit("/tmp", "ppo"), "/tmp"),
    "an environment of no suite": (lambda: fit("brax:antt", "ppo"), "brax"),
    "a module that is not there": (lambda: fit("no_such_module:world", "ppo"), "cannot be imported"),
    "a function that is not there": (lambda: fit(f"{HERE}:worl", "ppo"), "cannot be imported"),
    "an environment that is a number": (lambda: fit(f"{HERE}:three", "ppo"), "Env"),
    "an environment that stumbles": (lambda: fit(f"{HERE}:stumbles", "ppo"), "raised ValueError: no such luck"),
    "no such algorithm": (lambda: fit("cartpole", "pppo"), "Did you mean 'ppo'"),
    "an algorithm in capitals": (lambda: fit("cartpole", "PPO"), "algorithm"),
    "an algorithm that is a number": (lambda: fit("cartpole", NOT_AN_ENV), "algorithm"),
    "an algorithm that is none": (lambda: fit("cartpole", None), "algorithm"),
    "an algorithm that is a lambda": (lambda: fit("cartpole", lambda: ladder.ppo()), "num_envs"),
    "an algorithm with positional settings": (lambda: fit("cartpole", f"{HERE}:no_settings"), "keyword-only"),
    "an algorithm that is no record": (lambda: fit("cartpole", f"{HERE}:three"), "num_envs"),
    "a loss of episodes on segments": (lambda: fit("cartpole", f"{HERE}:whole"), "whole episodes"),
    "an algorithm class": (lambda: fit("cartpole", dict), "algorithm"),
    "a text algorithm on control": (lambda: fit("cartpole", "sft"), "text task"),
    "a table without a grid": (lambda: fit("cartpole", "sarsa"), "one-hot vectors"),
    "no such network": (lambda: cartpole(network="mpl"), "Did you mean 'mlp'"),
    "a network that is a number": (lambda: cartpole(network=3), "network"),
    "a network table without a kind that fits": (lambda: cartpole(network={"kind": "cnn"}), "cnn|images|observations"),
    "a network setting that is not there": (lambda: cartpole(network={"hiden": [8]}), "Did you mean 'hidden'"),
    "a network of no width": (lambda: cartpole(network={"hidden": [0]}), "hidden"),
    "a network of text": (lambda: cartpole(network={"hidden": "64"}), "hidden"),
    "a network that is one record": (
        lambda: cartpole(network=(networks.mlp(tiny.counter())[0],)),
        "network",
    ),
    "a network of three": (lambda: cartpole(network=(1, 2, 3)), "network"),
    "no seeds": (lambda: cartpole(seeds=0), "seeds"),
    "seeds that are a yes": (lambda: cartpole(seeds=True), "seeds"),
    "seeds below 0": (lambda: cartpole(seeds=-3), "seeds"),
    "seeds as text": (lambda: cartpole(seeds="8"), "seeds"),
    "half a seed": (lambda: cartpole(seeds=1.5), "seeds"),
    "seeds twice": (lambda: cartpole(seeds=[1, 1]), "seeds"),
    "a seed that is text": (lambda: cartpole(seeds=["a"]), "seeds"),
    "a seed that is none": (lambda: cartpole(seeds=[None]), "seeds"),
    "seeds as an array": (lambda: cartpole(seeds=np.arange(3.0)), "seeds"),
    "too many seeds": (lambda: cartpole(seeds=10**9), "seeds"),
    "no steps": (lambda: fit("cartpole", "ppo", total_steps=0), "total_steps"),
    "steps below 0": (lambda: fit("cartpole", "ppo", total_steps=-1), "total_steps"),
    "steps as text": (lambda: fit("cartpole", "ppo", total_steps="many"), "total_steps"),
    "half steps": (lambda: fit("cartpole", "ppo", total_steps=0.5), "total_steps"),
    "too many steps": (lambda: fit("cartpole", "ppo", total_steps=2**40), "total_steps"),
    "a setting that is not there": (lambda: cartpole(learning_rat=1), "Did you mean 'learning_rate'"),
    "a name of another library": (lambda: cartpole(lr=1e-3), "It is called 'learning_rate' here"),
    "a learning rate that is text": (lambda: cartpole(learning_rate="fast"), "learning_rate"),
    "a learning rate below 0": (lambda: cartpole(learning_rate=-1.0), "learning_rate"),
    "a learning rate that is not a number": (lambda: cartpole(learning_rate=float("nan")), "learning_rate"),
    "a discount above 1": (lambda: cartpole(gamma=1.5), "gamma"),
    "a setting that is an array": (lambda: cartpole(gamma=np.ones(3)), "gamma"),
    "minibatches that do not divide": (lambda: cartpole(num_minibatches=7), "does not divide"),
    "no environments": (lambda: cartpole(num_envs=0), "num_envs"),
    "settings of the environment as text": (lambda: cartpole(environment_settings="x"), "environment_settings"),
    "no such setting of the environment": (lambda: cartpole(environment_settings={"gravty": 1.0}), "gravty"),
    "the task as a setting": (lambda: cartpole(task="pong"), "task"),
    "a callback that is a function": (lambda: cartpole(callbacks=[print]), "Callback"),
    "a callback alone": (lambda: cartpole(callbacks=Callback()), "Callback|callbacks"),
    "callbacks as a number": (lambda: cartpole(callbacks=3), "callbacks"),
    "callbacks as text": (lambda: cartpole(callbacks="mine:stop"), "callbacks"),
    "callbacks of no table": (lambda: cartpole(callbacks={"mine": 3}), "callbacks"),
    "a callback that is not there": (lambda: cartpole(callbacks={f"{HERE}:stop": {}}), "cannot be imported"),
    "a logger alone": (lambda: cartpole(loggers="wandb"), "list of names"),
    "no such logger": (lambda: cartpole(loggers=["wand"]), "Did you mean 'wandb'"),
    "a logger that is a number": (lambda: cartpole(loggers=[3]), "logger"),
    "no such optimizer": (lambda: cartpole(optimizer={"kind": "adam"}), "optimizer.kind"),
    "an optimizer without a kind": (lambda: cartpole(optimizer={"b1": 0.9}), "kind"),
    "an optimizer that is a name": (lambda: cartpole(optimizer="adam"), "optimizer"),
    "an optimizer that stumbles": (lambda: cartpole(optimizer={"kind": f"{HERE}:stumbles"}), "no such luck"),
    "an optimizer that is a number": (lambda: cartpole(optimizer={"kind": f"{HERE}:three"}), "optimizer"),
    "a schedule that is a number": (
        lambda: cartpole(schedule={"kind": f"{HERE}:three"}, anneal_steps=None),
        "schedule",
    ),
    "a schedule beside annealing": (lambda: cartpole(schedule={"kind": f"{HERE}:three"}), "schedule|anneal_steps"),
    "a run to begin with that is not there": (lambda: cartpole(initial="nowhere"), "nowhere"),
    "a reward model in control": (lambda: cartpole(reward="nowhere"), "nowhere"),
    "rewards in control": (lambda: cartpole(rewards={"accuracy": 1.0}), "reward"),
    "an out that is a number": (lambda: cartpole(out=3), "out"),
    "a record with out": (lambda: fit(tiny.counter(), "ppo", out="x"), "With out"),
    "a setting beside a record": (
        lambda: fit("CartPole-v1", ladder.ppo(num_envs=8), learning_rate=1e-3),
        r"has its settings already: .* as in ladder.ppo\(learning_rate=0.001\), or give fit that function itself",
    ),
    "a setting beside a record of the DQN family": (
        lambda: fit("CartPole-v1", values.dqn(), gamma=0.5),
        r"a DeepQ, .* as in values.dqn\(gamma=0.5\)",
    ),
    "a lambda with out": (lambda: fit(lambda: tiny.counter(), "ppo", out="x"), "cannot be imported"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", FITS)
def test_fit_refuses(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fitting.training, "train", lambda *_, **__: pytest.fail("it was trained"))
    wrong, words = FITS[name]
    with pytest.raises(UserError) as refusal:
        wrong()
    check_sentence(str(refusal.value), words)
    assert not list(tmp_path.iterdir())


def check_sentence(sentence: str, words: str) -> None:
    assert re.search(words, sentence), sentence
    assert "\n" not in sentence
    assert len(sentence) < 1000
    assert sentence.rstrip(")").endswith((".", "?")), sentence


@cache
def policy() -> TrainedPolicy:
    """An untrained one of `tiny.counter`, whose observations are two numbers."""

    def nothing(*_: Any) -> Any:
        raise AssertionError("it acts, and does nothing else")

    env: Env = tiny.counter()
    made, _ = networks.mlp(env, hidden=(4,))
    learner = Learner(nothing, nothing, partial(make_actor, made), nothing)
    return TrainedPolicy(learner, made.init(jax.random.key(0)), env)


ACTS: dict[str, tuple[Any, str]] = {
    "one number": (3.0, "shape"),
    "none": (None, "shape|numbers"),
    "text": ("left", "shape|numbers"),
    "words": (["a", "b"], "numbers"),
    "too few numbers": ([1.0], "shape"),
    "too many numbers": ([1.0, 2.0, 3.0], "shape"),
    "nothing": ([], "shape"),
    "a batch of nothing": (np.zeros((0, 2)), "shape"),
    "a batch of batches": (np.zeros((2, 2, 2)), "shape"),
    "a ragged batch": ([[1.0, 2.0], [1.0]], "shape"),
    "a table": ({"x": 1.0}, "shape|numbers"),
    "complex numbers": ([1j, 2j], "numbers"),
    "dates": (np.array(["2026-01-01", "2026-01-02"], "datetime64[D]"), "numbers"),
}


@pytest.mark.parametrize("name", ACTS)
def test_act_refuses(name: str) -> None:
    obs, words = ACTS[name]
    with pytest.raises(UserError) as refusal:
        policy().act(obs)
    check_sentence(str(refusal.value), words)


def test_reset_refuses() -> None:
    for begins in (3, [True, False], "all"):
        with pytest.raises(UserError) as refusal:
            policy().reset(begins)
        check_sentence(str(refusal.value), "boolean")


LOADS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nowhere": (lambda path: jaxpg.load(path / "nowhere"), "is not the directory of a run"),
    "a number": (lambda path: jaxpg.load(NOT_AN_ENV), "directory"),
    "none": (lambda path: jaxpg.load(None), "directory"),
    "an empty folder": (lambda path: jaxpg.load(path), "is not the directory of a run"),
    "a file": (lambda path: jaxpg.load(Path(__file__)), "is not the directory of a run"),
    "no such checkpoint": (lambda path: jaxpg.load(path, checkpoint="first"), '"best" or "last"'),
    "a checkpoint that is a number": (lambda path: jaxpg.load(path, checkpoint=NOT_AN_ENV), '"best" or "last"'),
    "a damaged config": (lambda path: jaxpg.load(folder(path, "task = ")), "config.toml"),
    "a config of nothing": (lambda path: jaxpg.load(folder(path, "")), "it is empty"),
    "a config of code": (
        lambda path: jaxpg.load(folder(path, 'algorithm = "mine:spo"\ntask = "x"\nenvironment = "CartPole-v1"')),
        "trust_code=True",
    ),
    "a config without a checkpoint": (
        lambda path: jaxpg.load(
            folder(path, 'algorithm = "ppo"\ntask = "x"\nenvironment = "CartPole-v1"\nnetwork = { kind = "mlp" }')
        ),
        "no checkpoint",
    ),
    "a metric that is not there": (lambda path: TABLE["retrun"], "Did you mean 'return'"),
    "a metric that is a number": (lambda path: TABLE[NOT_AN_ENV], "no metric"),
    "no table of callbacks": (lambda path: callbacks._named_callback(f"{HERE}:three", {}), "jaxpg.Callback"),
    "no list of loggers": (lambda path: loggers.check_loggers({"wandb"}), "list of names"),
}
TABLE = MetricsTable({"steps": np.ones((2, 1)), "return": np.ones((2, 1))}, (0,))


def folder(path: Path, config: str) -> Path:
    (path / "config.toml").write_text(config)
    return path


@pytest.mark.parametrize("name", LOADS)
def test_load_refuses(name: str, tmp_path: Path) -> None:
    wrong, words = LOADS[name]
    with pytest.raises(UserError) as refusal:
        wrong(tmp_path)
    check_sentence(str(refusal.value), words)


COMMANDS = {
    "export nowhere": "is not the directory of a run",
    "export": "required: RUN",
    "export nowhere --seed-index x": "must be an integer",
    "export nowhere --checkpoint first": "invalid choice",
    "show": "required",
    "show cartpole ppo --seeds 0": "at least 1",
    "show cartpole ppo --set gamma": "gamma",
    "show cartpole mine:spo": "cannot be imported",
    "plot nowhere": "is not the directory of a run",
    "completion": "required: shell",
    "completion fish": "invalid choice",
    "train cartpole ppo --wandbb": "--wandb",
    "train cartpole ppo --tensorboard yes": "unrecognized arguments",
    "sweep cartpole ppo --wandb": "takes no --wandb",
    "play nowhere --gif x.png": "ends in .gif",
}


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_refuse(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert COMMANDS[command] in refused(capsys, *command.split())


def test_they_are_a_hundred() -> None:
    assert len(FITS) + len(ACTS) + len(LOADS) + len(COMMANDS) + 3 >= 100
