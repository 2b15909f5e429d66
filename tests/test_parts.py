"""Parts of a run by "module:function": algorithms, networks, optimizers, schedules and callbacks of the user's own."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

import jaxpg
from jaxpg import files, ladder, networks, values
from jaxpg.algorithm import PolicyGradient
from jaxpg.cli.main import main
from jaxpg.errors import UserError
from jaxpg.experiments import config as configs
from jaxpg.experiments import config_file, parts
from jaxpg.experiments.build import build
from jaxpg.ladder_settings import A2CSettings, child_of
from jaxpg.runs import Callback
from jaxpg.runs.callbacks import named_callbacks
from jaxpg.training import run_directory
from jaxpg.training.advance import seed_keys
from jaxpg.types import Critic, Env, Policy
from jaxpg.user_input import user_code
from jaxpg.values.dqn import DQNSettings


@child_of(ladder.a2c, num_envs=4, num_steps=8)
def timid(*, share: float = 0.5, **inherited: Unpack[A2CSettings]) -> PolicyGradient:
    """A2C that believes a share of its advantages.

    Args:
        share: how much of them.
    """
    parent = ladder.a2c(**inherited)
    return parent._replace(surrogate=lambda new, old, psi: share * parent.surrogate(new, old, psi))


@child_of(values.dqn, num_envs=4)
def between(*, share: float = 0.5, **inherited: Unpack[DQNSettings]):  # type: ignore[no-untyped-def]
    """DQN whose two networks choose the successor's action together."""
    return values.dqn(**inherited)._replace(selector=lambda q, q_target: share * q + (1 - share) * q_target)


def unannotated(*, num_envs: int = 4):  # type: ignore[no-untyped-def]
    return values.dqn(num_envs=num_envs)


def misannotated(*, num_envs: int = 4) -> values.DeepQ:
    return ladder.ppo(num_envs=num_envs)  # type: ignore[return-value]


def lossless(*, num_envs: int = 4) -> values.DeepQ:
    return values.dqn(num_envs=num_envs)._replace(loss=lambda q, target: bool(q.sum() > 0))  # type: ignore[arg-type]


def small(env: Env, *, width: int = 4, act: str = "tanh") -> tuple[Policy, Critic]:
    """One hidden layer."""
    return networks.mlp(env, hidden=(width,), activation=act)


def halving(*, first: float = 1e-2, over: int = 1000) -> Callable[[Any], Any]:
    return lambda steps: first * 0.5 ** (steps / over)


def stop_at(*, steps: int = 100) -> Callback:
    seen = [0]

    def look(row: Any) -> None:
        seen[0] = int(row["steps"].min())

    return Callback(on_row=look, should_stop=lambda: seen[0] >= steps)


def stop_once(*, after: int = 2) -> Callback:
    """True once, when it is asked for the second time."""
    answers = iter(range(1, 1_000))
    return Callback(should_stop=lambda: next(answers) == after)


def stumbling() -> Callback:
    return Callback(on_row=lambda row: row["nothing"])


def broken() -> Any:
    raise RuntimeError("no")


def downhill_schedule() -> Any:
    return lambda steps: jnp.full(2, -1.0)


def wrong_network(env: Env, *, width: int = 3) -> Any:
    return networks.mlp(env)[0]


def wide_network(*, width: int = 3) -> Any:
    return None


def weighted_network(env: Env, *, weights=np.ones(3)) -> Any:  # noqa: B008
    return networks.mlp(env)


def untraceable(*, num_envs: int = 4) -> PolicyGradient:
    def surrogate(log_prob: Any, old: Any, psi: Any) -> Any:
        return log_prob if bool(psi.sum() > 0) else old

    return ladder.a2c(num_envs=num_envs)._replace(surrogate=surrogate)


NAMED = {
    "network": {"kind": "test_parts:small", "width": 8},
    "optimizer": {"kind": "optax:scale_by_rms", "decay": 0.8},
    "schedule": {"kind": "test_parts:halving", "over": "total_steps"},
    "callbacks": {"test_parts:stop_at": {"steps": 200}},
    "share": 0.25,
    "total_steps": 400,
}


def test_a_run_that_names_parts_is_written_and_read_again(tmp_path: Path) -> None:
    """Only by who trusts it."""
    config = configs.resolve_config("catch", "test_parts:timid", NAMED)
    assert (config.settings["share"], config.settings["num_envs"], config.network["act"]) == (0.25, 4, "tanh")
    assert config.schedule == {"kind": "test_parts:halving", "over": 400}
    text = files.toml_dumps(configs.to_dict(config))
    assert tomllib.loads(text)["test_parts:timid"]["share"] == 0.25
    (tmp_path / "config.toml").write_text(text)
    assert configs.load_config(tmp_path, trust_code=True) == config
    with pytest.raises(UserError, match="names code that is not part of jaxpg") as refusal:
        configs.load_config(tmp_path)
    for name in ("test_parts and call timid", "call small", "optax and call", "call halving", "call stop_at"):
        assert name in str(refusal.value)


def test_settings_are_those_of_the_function_and_of_its_parents() -> None:
    known = parts.algorithm_options("test_parts:timid")
    assert known["share"].meaning == "how much of them."
    assert known["gae_lambda"].meaning == parts.algorithm_options("a2c")["gae_lambda"].meaning != ""
    assert known["num_envs"].default == 4


SMALL_DQN = {"num_envs": 4, "learning_starts": 20, "repeats": 4, "batch_size": 8, "buffer_size": 64}


@pytest.mark.parametrize(("share", "same"), [(0.0, "dqn"), (1.0, "double_dqn")])
def test_a_deep_q_of_the_user_is_trained_as_those_of_the_family(share: float, same: str) -> None:
    """Between DQN and Double DQN, and each of them at an end."""

    def trained(algorithm: str, **more: Any) -> Any:
        learner = build(configs.resolve_config("catch", algorithm, SMALL_DQN | more)).learner
        state = learner.init(jax.random.key(0))
        for i in range(5):
            state, _ = jax.jit(learner.step)(state, jax.random.key(i))
        assert state.updates > 10
        return state.params

    own, expected = trained(OWN + "between", share=share), trained(same)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), own, expected)


def test_fit_takes_a_deep_q(tmp_path: Path) -> None:
    """As a record, and as a function by whose name its run is read."""
    settings: dict[str, Any] = {"seeds": 1, "total_steps": 160, "progress": False, "evaluation_episodes": 4}
    record = values.dqn(num_envs=4, learning_starts=20, buffer_size=64)._replace(loss=values.targets.squared_loss)
    assert jaxpg.fit("catch", record, network=values.mlp, **settings).metrics["td_loss"].size
    with pytest.raises(UserError, match="this is a DeepQ, which has none"):
        jaxpg.fit("catch", record, out=tmp_path / "run", **settings)
    jaxpg.fit("catch", between, out=tmp_path / "run", **SMALL_DQN, **settings)
    assert jaxpg.load(tmp_path / "run", trust_code=True).policy.act(np.zeros((10, 5))).shape == ()


def test_a_section_of_a_task_may_be_that_of_a_function(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'environment = "CartPole-v1"\n[a2c]\ngamma = 0.5\n["test_parts:timid"]\nlike = "a2c"\nshare = 0.1\n'
    )
    config = configs.resolve_config(path, "test_parts:timid")
    assert (config.settings["share"], config.settings["gamma"]) == (0.1, 0.5)
    assert configs.resolve_config(path, "a2c").settings["gamma"] == 0.5
    path.write_text(path.read_text().replace("share", "shore"))
    with pytest.raises(UserError, match=r"no setting 'shore' of test_parts:timid.*Did you mean 'share'"):
        configs.resolve_config(path, "test_parts:timid")


def test_an_optimizer_has_its_gradient_clipped_and_a_schedule_counts_environment_steps() -> None:
    record = parts.with_own_parts(
        ladder.ppo(),
        optimizer={"kind": "optax:identity"},
        schedule={"kind": "test_parts:halving", "first": 0.5, "over": 10},
        max_grad_norm=1.0,
    )
    optimizer, gradient = record.optimizer(), jnp.array([3.0, 4.0])
    np.testing.assert_allclose(optimizer.update(gradient, optimizer.init(gradient))[0], [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose([record.learning_rate(jnp.array(t)) for t in (0, 10, 20)], [0.5, 0.25, 0.125])
    same = parts.with_own_parts(ladder.ppo(), optimizer={}, schedule={}, max_grad_norm=None)
    assert same.optimizer.keywords == ladder.ppo().optimizer.keywords


def test_a_dotted_module_is_one_key() -> None:
    nested = config_file.nested({"callbacks.my.package.mine:stop.patience": 3, "network.hidden": [4]})
    assert nested == {"callbacks": {"my.package.mine:stop": {"patience": 3}}, "network": {"hidden": [4]}}


OWN = "test_parts:"


@pytest.mark.parametrize(
    ("algorithm", "settings", "sentence"),
    [
        ("test_parts:nothing", {}, "The algorithm test_parts:nothing cannot be imported: test_parts has no 'nothing'"),
        ("test_parts:qqqqqqqq", {}, r"has no 'qqqqqqqq'\. It has: timid, between, .*, and \d+ more\.$"),
        ("no_such_module:f", {}, "cannot be imported: ModuleNotFoundError.*PYTHONPATH"),
        ("test_parts:OWN", {}, "must be a function"),
        ("brax:ppo", {}, "There is no algorithm 'brax:ppo'"),
        (OWN + "timid", {"shares": 1.0}, "Did you mean 'share'"),
        (OWN + "timid", {"share": "much"}, "share must be a number, not 'much'"),
        (OWN + "timid", {"lr": 1.0}, "called 'learning_rate' here"),
        (OWN + "unannotated", {}, "returns a DeepQ, .*: annotate the function with -> DeepQ"),
        (OWN + "misannotated", {}, "must return a DeepQ, as its annotation says, not a PolicyGradient"),
        (OWN + "lossless", {}, "raised TracerBoolConversionError.*test_parts.py, line"),
        (OWN + "between", {"network.kind": "recurrent"}, "no kind of network 'recurrent' for test_parts:between"),
        (OWN + "between", {"num_envs": 3, "num_steps": 3}, "no setting 'num_steps'"),
        (OWN + "untraceable", {}, "raised TracerBoolConversionError.*test_parts.py, line"),
        ("ppo", {"network.kind": OWN + "nothing"}, "The network test_parts:nothing cannot be imported"),
        ("ppo", {"network.kind": OWN + "wide_network"}, "must take env as its first argument"),
        ("ppo", {"network.kind": OWN + "weighted_network"}, r"weights has the default array\(\[1.*no config can state"),
        ("ppo", {"network.kind": OWN + "wrong_network"}, r"must return a pair \(Policy, Critic\), not a Policy"),
        ("ppo", {"network.kind": OWN + "small", "network.widht": 4}, "Did you mean 'width'"),
        ("ppo", {"network": {"kind": OWN + "small", "width": 0.5}}, "width must be an integer"),
        ("ppo", {"network": {"kind": OWN + "small", "act": "tan"}}, "tan"),
        ("ppo", {"optimizer": "adam"}, "optimizer must be a table"),
        ("ppo", {"optimizer.kind": "adam"}, "optimizer.kind must be the name of a function"),
        ("ppo", {"optimizer.b1": 0.9}, "optimizer.kind must be the name of a function, .*not None"),
        ("ppo", {"optimizer.kind": "optax:adam"}, "optax:adam needs a value for learning_rate"),
        ("ppo", {"optimizer": {"kind": "optax:adam", "learning_rate": 1.0}}, "include the sign.*scale_by_adam"),
        ("ppo", {"optimizer": {"kind": "optax:scale_by_lion", "b3": 1.0}}, "has no setting 'b3'"),
        ("ppo", {"optimizer": {"kind": "optax:scale_by_lion", "b1": "x"}}, "b1 must be like its default 0.9"),
        ("ppo", {"optimizer.kind": OWN + "halving"}, "must return an optax.GradientTransformation, not a function"),
        ("ppo", {"optimizer.kind": OWN + "broken"}, "The optimizer test_parts:broken raised RuntimeError: no"),
        ("ppo", {"schedule.kind": OWN + "halving"}, "anneal_steps = 500000 would have no effect"),
        ("ppo", {"schedule.kind": OWN + "halving", "learning_rate": 1.0}, "learning_rate would have no effect"),
        ("ppo", {"schedule.kind": OWN + "downhill_schedule", "anneal_steps": None}, "must give one number"),
        ("ppo", {"schedule.kind": OWN + "stop_at", "anneal_steps": None}, "must return a function of"),
        ("ppo", {"schedule": {"kind": OWN + "halving", "frist": 1.0}, "anneal_steps": None}, "Did you mean 'first'"),
        ("ppo", {"callbacks": ["x"]}, "callbacks must be a table"),
        ("ppo", {"callbacks": {"x": 3}}, "callbacks.x must be a table"),
        ("dqn", {"network.kind": OWN + "small"}, "must return a flax module.*not a tuple"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_a_sentence(algorithm: str, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        build(configs.resolve_config("cartpole", algorithm, settings))


@pytest.mark.parametrize(
    ("callbacks", "sentence"),
    [
        ({"x": {}}, "callback takes the name of a function"),
        ({OWN + "halving": {}}, "must return a jaxpg.Callback, not a function"),
        ({OWN + "stop_at": {"stepz": 3}}, "Did you mean 'steps'"),
        ({OWN + "stop_at": {"steps": "x"}}, "steps must be like its default 100"),
        ({OWN + "broken": {}}, "The callback test_parts:broken raised RuntimeError: no"),
    ],
)
def test_what_is_no_callback_is_refused(callbacks: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        jaxpg.fit("catch", "a2c", callbacks=callbacks, out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_what_a_callback_raises_is_told_with_its_place() -> None:
    (callback,) = named_callbacks(configs.resolve_config("catch", "a2c", {"callbacks": {OWN + "stumbling": {}}}))
    with pytest.raises(UserError, match=r"raised KeyError: 'nothing' \(test_parts.py, line"):
        callback.on_row({})
    assert callback.on_evaluation is None


def test_a_sweep_takes_no_callbacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--grid", "gamma=0.9,0.99", "--set", "callbacks.test_parts:stop_at={}", "--out", str(tmp_path / "x")]
    assert "A sweep takes no callbacks" in refused(capsys, "sweep", "catch", "a2c", *words)


@pytest.mark.full
def test_a_callback_that_is_true_once_has_ended_the_run(tmp_path: Path) -> None:
    """It is not interrupted."""
    sets = ["--set", f"callbacks.{OWN}stop_once={{}}", "--set", "num_envs=4", "--set", "evaluation_episodes=4"]
    words = ["--steps", "100000", "--seeds", "1", "--quiet", "--out", str(tmp_path / "run")]
    assert main(["train", "probe-value", "reinforce", *words, *sets]) == 0
    assert run_directory.load_metrics(tmp_path / "run")["steps"][-1, 0] < 2_000


def test_a_run_that_a_callback_ends_is_evaluated_and_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its score is that of its last parameters; it goes on only where other steps are asked for."""
    out, settings = tmp_path / "run", {"num_envs": 4, "num_steps": 5, "evaluations": 2, "evaluation_episodes": 4}
    run = jaxpg.fit(
        "catch", "a2c", callbacks={OWN + "stop_at": {"steps": 200}}, seeds=2, total_steps=2_000, out=out,
        **settings,
    )  # fmt: skip
    end = "a2c: ended by the callback test_parts:stop_at at 200 of 2,000 steps."
    assert end in capsys.readouterr().out
    metrics = run_directory.load_metrics(out)
    assert metrics["steps"][-1].tolist() == [200, 200] == metrics["steps"][-2].tolist()
    assert np.isfinite(metrics["evaluation_return"][-1]).all()
    assert np.isnan(metrics["evaluation_return"][1:-1]).all()
    assert metrics["iterations"][-1].tolist() == [0, 0]
    keys = jax.vmap(jax.random.fold_in)(jax.vmap(seed_keys)(jnp.arange(2)).evaluation, run.state.iteration)
    measured = jax.vmap(run.experiment.evaluate)(run.state.learner, keys)
    np.testing.assert_allclose(metrics["evaluation_return"][-1], measured["return"], rtol=1e-6)
    assert main(["resume", str(out), "--trust-code"]) == 0
    printed = capsys.readouterr().out
    assert "Finished already at 200 steps, nothing was trained; --steps N goes on." in printed
    assert end in printed
    assert end in (out / "report.html").read_text()
    assert len(run_directory.load_metrics(out)["steps"]) == len(metrics["steps"])
    assert main(["resume", str(out), "--quiet", "--trust-code", "--steps", "2100"]) == 0
    assert len(run_directory.load_metrics(out)["steps"]) == len(metrics["steps"]) + 2
    printed = capsys.readouterr().out
    assert "already" not in printed
    assert "ended by the callback test_parts:stop_at at" in printed


@pytest.mark.full
def test_the_commands_train_with_parts_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The callback ends the run, which is then a run as any other; what looks at it asks for trust."""
    sets = [
        f"--set={name}={value}"
        for name, value in (
            ("network.kind", OWN + "small"),
            ("optimizer.kind", "optax:scale_by_rms"),
            ("schedule.kind", OWN + "halving"),
            ("callbacks.test_parts:stop_at.steps", 300),
            ("evaluation_episodes", 4),
        )
    ]
    words = ["--steps", "1000", "--seeds", "1", "--quiet", *sets]
    assert main(["compare", "catch", OWN + "timid", "a2c", "--out", str(tmp_path / "compared"), *words]) == 0
    end = "test_parts:timid: ended by the callback test_parts:stop_at at 3"
    assert end in capsys.readouterr().out
    assert main(["resume", str(tmp_path / "compared"), "--trust-code"]) == 0
    printed = capsys.readouterr().out
    assert re.search(
        "^Finished already at 3[0-9]{2} to [0-9]+ steps, nothing was trained; --steps N goes", printed, re.M
    )
    assert end in printed
    assert end in (tmp_path / "compared" / "comparison.html").read_text()
    run = tmp_path / "compared" / "test_parts-timid"
    metrics = run_directory.load_metrics(run)
    assert 300 <= metrics["steps"][-1, 0] < 400
    np.testing.assert_allclose(metrics["learning_rate"][1], 1e-2, rtol=0.05)
    assert "--trust-code" in refused(capsys, "eval", str(run))
    assert jaxpg.load(run, trust_code=True).policy.act(np.zeros((10, 5))).shape == ()


def test_a_file_beside_the_package_is_named_where_it_fails() -> None:
    """Its name may begin as the folder of the package does."""
    neighbour = f"{Path(user_code.__file__).parent.parent}_mine.py"
    with pytest.raises(ZeroDivisionError) as raised:
        exec(compile("\n1 / 0", neighbour, "exec"))
    assert user_code.describe_failure(raised.value).endswith("(jaxpg_mine.py, line 2)")
