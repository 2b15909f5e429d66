"""The packages from which environments on the host come: `gymnasium:ID` and `envpool:ID`, with their settings.

Each needs a package that jaxpg does not install by itself, and which is imported when the first of its environments is
asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxpg.envs.host import vectors
from jaxpg.envs.host.host_env import host_env
from jaxpg.errors import UserError, excerpt, refuse_unknown
from jaxpg.types import Discrete, Env
from jaxpg.user_input.user_code import argument_defaults, explain_failure, import_user_module

VECTORIZATIONS = {"sync": vectors.sync_vector, "async": vectors.async_vector}
_NOT_SETTINGS = ("self", "render_mode")
_OF_THE_POOL = (
    "num_envs", "batch_size", "num_threads", "max_num_players", "thread_affinity_offset", "base_path", "seed",
    "env_seed", "gym_reset_return_info", "task",
)  # fmt: skip
"""What EnvPool calls settings and jaxpg sets itself."""


class Package(NamedTuple):
    """A package of environments.

    ids(): its environments.
    settings(id): what `make` takes for the environment, with defaults.
    source(id, settings): the environment.
    """

    ids: Callable[[], list[str]]
    settings: Callable[[str], dict[str, Any]]
    source: Callable[[str, dict[str, Any]], vectors.Source]


def default_settings(name: str) -> dict[str, Any]:
    """The settings of `prefix:id`, with their defaults.

    Raises:
        UserError: the package is not installed, or has no such environment; the nearest is named.
    """
    prefix, _, env_id = name.partition(":")
    return PACKAGES[prefix].settings(env_id)


def make(name: str, settings: dict[str, Any]) -> Env:
    """The environment `prefix:id` with these settings, which are among `default_settings` and have their types.

    Raises:
        UserError: it cannot be made, has spaces that jaxpg cannot use, or no time limit.
    """
    prefix, _, env_id = name.partition(":")
    return host_env(PACKAGES[prefix].source(env_id, default_settings(name) | settings))


def ids(prefix: str) -> list[str]:
    """The environments of a package, without the prefix.

    Raises:
        UserError: the package is not installed.
    """
    return PACKAGES[prefix].ids()


def is_of_this_script(name: str) -> bool:
    """Whether an environment was registered in Gymnasium by the script that runs, so that no other program finds it."""
    if not name.startswith("gymnasium:"):
        return False
    entry_point = _gymnasium_spec(name.partition(":")[2]).entry_point
    module = entry_point.partition(":")[0] if isinstance(entry_point, str) else getattr(entry_point, "__module__", "")
    return module == "__main__"


def comes_in(name: str) -> bool:
    """Whether an environment of this name is from one of these packages."""
    return name.partition(":")[0] in PACKAGES and ":" in name


@contextlib.contextmanager
def _extra(package: str) -> Iterator[None]:
    """Imports a package that is an extra of jaxpg's."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(
            f"{package}: environments need the package {package}. Install it with: pip install 'jaxpg[{package}]'."
        ) from error


@contextlib.contextmanager
def _deprecations_ignored() -> Iterator[None]:
    """Without the warnings of packages about themselves; where they are errors, Box2D's crash Python on import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _gymnasium_spec(env_id: str) -> Any:
    """Gymnasium's record of an environment; `MODULE:ID` imports the module first, which registers it."""
    with _extra("gymnasium"):
        import gymnasium
    module, colon, registered = env_id.rpartition(":")
    if colon:
        import_user_module(module, f"gymnasium:{env_id}", "environment")
    try:
        with _deprecations_ignored():
            return gymnasium.spec(registered)
    except (gymnasium.error.Error, ValueError):
        package, slash, _ = registered.rpartition("/")
        if not colon and slash and not any(x.startswith(f"{package}/") for x in gymnasium.registry):
            raise UserError(
                f"There is no environment 'gymnasium:{env_id}': the package that has {package}/ registers it when it "
                f"is imported. Name its module, gymnasium:MODULE:{env_id}, as in gymnasium:ale_py:ALE/Pong-v5."
            ) from None
        known = [f"gymnasium:{module}{colon}{x}" for x in gymnasium.registry]
        refuse_unknown("environment", f"gymnasium:{env_id}", known)


def _gymnasium_ids() -> list[str]:
    with _extra("gymnasium"):
        import gymnasium
    return sorted(gymnasium.registry)


def _gymnasium_settings(env_id: str) -> dict[str, Any]:
    from gymnasium.envs.registration import load_env_creator

    spec = _gymnasium_spec(env_id)
    if spec.entry_point is None:
        raise UserError(
            f"gymnasium:{env_id} is registered without an entry_point, by which jaxpg makes single environments: "
            "give one to gymnasium.register, in addition to the vector_entry_point."
        )
    with _making(f"gymnasium:{env_id}"):
        creator = spec.entry_point if callable(spec.entry_point) else load_env_creator(spec.entry_point)
    of_the_class = {name: x for name, x in argument_defaults(creator).items() if name not in _NOT_SETTINGS}
    limit = inspect.Parameter.empty if spec.max_episode_steps is None else spec.max_episode_steps
    return of_the_class | spec.kwargs | {"max_episode_steps": limit, "vectorization": "sync"}


def _gymnasium_source(env_id: str, settings: dict[str, Any]) -> vectors.Source:
    import gymnasium

    from jaxpg.sub_env import make_sub_env

    name, spec = f"gymnasium:{env_id}", _gymnasium_spec(env_id)
    settings = dict(settings)
    vectorization, limit = settings.pop("vectorization"), settings["max_episode_steps"]
    if vectorization not in VECTORIZATIONS:
        refuse_unknown("vectorization", str(vectorization), VECTORIZATIONS, f" of {name}")
    if type(limit) is not int or limit < 1:
        raise UserError(f"{name}: max_episode_steps must be an integer, at least 1, not {excerpt(limit)}.")
    spec = dataclasses.replace(spec, order_enforce=False)  # a wrapper that costs time: nothing here is stepped first
    make_one = partial(gymnasium.make, spec, disable_env_checker=True, **settings)
    with _making(name), _closed_at_last(make_one(), name) as env:
        flatten = not _is_plain(env.observation_space)
        if flatten and not _can_be_flattened(env.observation_space):
            _plain(env.observation_space, "observations", name)
    make_one_of_vector = partial(make_sub_env, make_one, name, flatten)
    with _making(name), _closed_at_last(make_one_of_vector(), name) as env:
        space = _plain(env.observation_space, "observations", name)
        convert, observation_space = vectors.observation_converter(space, name)
        to_action, action_space = vectors.action_converter(_plain(env.action_space, "actions", name))
        env.reset(seed=0)
    make_one_of_vector = partial(make_one_of_vector, spaces=(env.observation_space, env.action_space))
    # Gymnasium's own environments are truncated by its time limit alone and ask of an action what a number of Python's
    # has, unless a wrapper does otherwise. Another's may want `action.item()`.
    own = isinstance(spec.entry_point, str) and spec.entry_point.startswith("gymnasium.envs.")
    own = own and not spec.additional_wrappers
    drawable = "rgb_array" in (env.metadata.get("render_modes") or ())
    return vectors.Source(
        name=name,
        make=partial(VECTORIZATIONS[vectorization], make_one_of_vector),
        observation_space=observation_space,
        action_space=action_space,
        time_limit=limit,
        min_truncation_step=limit if own else 1,
        convert=convert,
        to_action=to_action,
        repeatable=not spec.nondeterministic,
        python_integers=own and isinstance(action_space, Discrete),
        frames=partial(_frames, make_one, to_action) if drawable else None,
    )


@contextlib.contextmanager
def _making(name: str) -> Iterator[None]:
    """What makes an environment, and looks at it: what it raises is a UserError, and its deprecations are ignored."""
    with explain_failure(f"The environment {name} cannot be made: it"), _deprecations_ignored():
        yield


@contextlib.contextmanager
def _closed_at_last(env: Any, name: str) -> Iterator[Any]:
    """An environment that is ended at last."""
    try:
        yield env
    finally:
        vectors.close_or_warn(env.close, name)


def _frames(
    make_one: Callable[..., Any], to_action: Callable[[np.ndarray], np.ndarray], seed: int, actions: np.ndarray
) -> tuple[list[np.ndarray], list[float]]:
    """The pictures and the rewards of an episode, which is played once more."""
    with contextlib.closing(make_one(render_mode="rgb_array")) as env:
        env.reset(seed=seed)
        pictures, rewards = [copy(env.render())], []
        for action in to_action(actions):
            rewards.append(np.asarray(env.step(action)[1], float).item())
            pictures.append(copy(env.render()))  # many draw into one array again and again
    return pictures, rewards


def _is_plain(space: Any) -> bool:
    return type(space).__name__ in ("Box", "Discrete")


def _can_be_flattened(space: Any) -> bool:
    try:
        return space.is_np_flattenable
    except NotImplementedError:  # a space of a kind of its own, such as MiniGrid's missions
        return False


def _plain(space: Any, what: str, name: str) -> Any:
    if not _is_plain(space):
        flat = ", and what Gymnasium's FlattenObservation can flatten" if what == "observations" else ""
        raise UserError(
            f"{name}: the {what} are {excerpt(space)}, and jaxpg knows {what} of Box and Discrete{flat}. Wrap the "
            "environment where you register it."
        )
    if 0 in space.shape:
        raise UserError(f"{name}: the {what} are {excerpt(space)}, which has no numbers: give it one at least.")
    return space


def _envpool_ids() -> list[str]:
    with _extra("envpool"):
        import envpool
    return sorted(envpool.list_all_envs())


def _envpool_config(env_id: str) -> dict[str, Any]:
    """EnvPool's settings of an environment."""
    known = _envpool_ids()
    import envpool

    if env_id not in known:
        refuse_unknown("environment", f"envpool:{env_id}", [f"envpool:{x}" for x in known])
    return envpool.make_spec(env_id).config._asdict()


def _envpool_settings(env_id: str) -> dict[str, Any]:
    config = _envpool_config(env_id)
    return {name: x for name, x in config.items() if name not in _OF_THE_POOL}


def _envpool_source(env_id: str, settings: Mapping[str, Any]) -> vectors.Source:
    import envpool

    name = f"envpool:{env_id}"
    with _making(name):
        spec = envpool.make_spec(env_id, **settings)
    limit = int(settings.get("max_episode_steps", 0))
    if limit < 1:
        raise UserError(f"{name} states no time limit, and jaxpg needs one: set max_episode_steps to at least 1.")
    space = _plain(spec.observation_space, "observations", name)
    convert, observation_space = vectors.observation_converter(space, name)
    to_action, action_space = vectors.action_converter(_plain(spec.action_space, "actions", name))
    make_pool = partial(envpool.make, env_id, env_type="gymnasium", **settings)
    return vectors.Source(
        name=name,
        make=partial(vectors.envpool_vector, make_pool),
        observation_space=observation_space,
        action_space=action_space,
        time_limit=limit,
        min_truncation_step=1,
        convert=convert,
        to_action=to_action,
        repeatable=False,
    )


PACKAGES: dict[str, Package] = {
    "gymnasium": Package(_gymnasium_ids, _gymnasium_settings, _gymnasium_source),
    "envpool": Package(_envpool_ids, _envpool_settings, _envpool_source),
}
"""By prefix."""
