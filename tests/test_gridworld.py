"""The page of the grid world: its numbers are jaxpg's, its learners are slow loops in NumPy, and it works by hand."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import webbrowser
from pathlib import Path

import jax
import numpy as np
import pytest
from chromium import PATH as CHROMIUM
from chromium import chromium

from jaxpg import envs, values
from jaxpg.cli import gridworld
from jaxpg.cli.main import main
from jaxpg.report.gridworld import gridworld_page, script

NODE = shutil.which("node")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
ENGINES = [
    pytest.param("node", marks=pytest.mark.skipif(NODE is None, reason="node is not installed")),
    pytest.param("chromium", marks=needs_chromium),
]
READY = "document.body?.dataset.position !== undefined"
RANDOM_WALLS = (9, 10, 18, 21, 29, 35, 43, 44, 49, 53)
WORLDS = {
    "plain": {"goal": 7, "trap": 27, "start": 56, "walls": (), "slip": 0.0, "livingCost": 0.0, "gamma": 0.9},
    "slippery": {"goal": 7, "trap": 15, "start": 56, "walls": (), "slip": 0.2, "livingCost": 0.04, "gamma": 0.99},
    "undiscounted": {"goal": 7, "trap": 15, "start": 56, "walls": (), "slip": 0.2, "livingCost": 0.04, "gamma": 1.0},
    "walls": {"goal": 36, "trap": 2, "start": 0, "walls": RANDOM_WALLS, "slip": 0.35, "livingCost": 0.1, "gamma": 0.8},
    "free circles": {
        "goal": 50,
        "trap": 12,
        "start": 5,
        "walls": (3, 11),
        "slip": 0.0,
        "livingCost": 0.0,
        "gamma": 1.0,
    },
    "worth nothing at first": {
        **{"goal": 0, "trap": 9, "start": 8, "slip": 0.0, "livingCost": 0.0, "gamma": 0.9},
        "walls": (2, 10, 16, 17),
    },
    "only a trap": {
        **{"goal": 0, "trap": 27, "start": 56, "slip": 0.2, "livingCost": 0.0, "gamma": 1.0},
        "walls": (1, 8),
    },
    "a block of walls": {
        **{"goal": 7, "trap": 27, "start": 56, "slip": 0.1, "livingCost": 0.02, "gamma": 1.0},
        "walls": (33, 34, 35, 41, 42, 43, 49, 50, 51),
    },
}
QUICK = "walls", "free circles", "worth nothing at first", "only a trap"
EVERY_WORLD = [pytest.param(x, marks=() if x in QUICK else pytest.mark.full) for x in WORLDS]


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def browser():
    with chromium() as page:
        yield page


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "gridworld.html"
    assert main(["gridworld", "--out", str(path)]) == 0
    return path.as_uri()


@pytest.fixture
def page(browser, address):
    """The page as it opens, on a wide screen."""
    return opened(browser, address)


def opened(browser, address, **settings):
    browser.requests.clear()
    browser.errors.clear()
    browser.screen(1280, 900)
    texts = {key: ".".join(map(str, x)) if isinstance(x, tuple) else str(x) for key, x in settings.items()}
    browser.open(f"{address}#{'&'.join(f'{key}={text}' for key, text in texts.items())}", READY)
    return browser


def run_js(engine, request, code, *modules):
    """The value of the JavaScript expression `code`, with modules of the page before it."""
    program = script(*modules)
    if engine == "chromium":
        return json.loads(
            request.getfixturevalue("browser").evaluate(f"(() => {{{program}; return JSON.stringify({code})}})()")
        )
    done = subprocess.run(
        [NODE, "--input-type=module"],
        input=f"{program}; console.log(JSON.stringify({code}))",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def cell(state):
    return divmod(state, 8)


def make_world(world):
    places = {name: cell(world[name]) for name in ("goal", "trap", "start")}
    walls = [cell(s) for s in world["walls"]]
    return envs.grid_world(8, 8, living_cost=world["livingCost"], slip=world["slip"], walls=walls, **places)


def steps_of_jaxpg(world, method):
    iterate = {"policy_iteration": values.policy_iteration_steps, "value_iteration": values.value_iteration_steps}
    return list(iterate[method](make_world(world), world["gamma"]))


# The numbers


@pytest.mark.parametrize("method", ["policy_iteration", "value_iteration"])
@pytest.mark.parametrize("name", EVERY_WORLD)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_sweep_is_jaxpgs(engine, name, method, request):
    """Kind, values and policy of every step."""
    world = WORLDS[name]
    expected = steps_of_jaxpg(world, method)
    generator = {"policy_iteration": "policyIterationSteps", "value_iteration": "valueIterationSteps"}[method]
    setting = json.dumps({**world, "rows": 8, "columns": 8})
    code = (
        f"[...{generator}(makeMDP({setting}), {world['gamma']})]"
        ".map(({ kind, values, policy }) => [kind, [...values], [...policy]])"
    )
    steps = run_js(engine, request, code, "solver")
    assert [kind for kind, _, _ in steps] == [step.kind for step in expected]
    np.testing.assert_allclose([v for _, v, _ in steps], [step.values for step in expected], atol=1e-9)
    live = ~np.asarray(make_world(world).terminal)
    policies = np.reshape([p for _, _, p in steps], (len(steps), 64, 4))
    np.testing.assert_array_equal(policies[:, live], np.stack([step.policy for step in expected])[:, live])


READ_ALL_STEPS = """
(() => {
  const seen = [], forward = document.getElementById("forward");
  document.getElementById("first").click();
  for (;;) {
    const numbers = [...document.querySelectorAll(".cell")].map((cell) => Number(cell.dataset.value));
    seen.push([document.getElementById("phase").textContent, numbers]);
    if (forward.disabled) return seen;
    forward.click();
  }
})()
"""
KINDS = {"Start": "start", "Sweep": "sweep", "Evaluation": "evaluation", "Improvement": "improvement"}


@needs_chromium
@pytest.mark.parametrize("method", ["policy_iteration", "value_iteration"])
@pytest.mark.parametrize("name", EVERY_WORLD)
def test_the_page_shows_every_sweep_of_jaxpg(name, method, browser, address):
    """What its cells hold while the reader steps forward from the first step to the last."""
    expected = steps_of_jaxpg(WORLDS[name], method)
    seen = opened(browser, address, method=method, **WORLDS[name]).evaluate(READ_ALL_STEPS)
    assert [KINDS[phase.split()[0].strip(":")] for phase, _ in seen] == [step.kind for step in expected]
    np.testing.assert_allclose([numbers for _, numbers in seen], [step.values for step in expected], atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_exact_values_are_those_of_the_linear_solve(engine, request):
    world = WORLDS["walls"]
    policy = np.random.default_rng(0).dirichlet(np.ones(4), 64)
    setting = json.dumps({**world, "rows": 8, "columns": 8})
    code = f"[...exactValues(makeMDP({setting}), {json.dumps(policy.ravel().tolist())}, 0.8)]"
    expected = envs.state_values(make_world(world), policy, 0.8)
    np.testing.assert_allclose(run_js(engine, request, code, "solver"), expected, atol=1e-12)


# The learners, beside slow loops that take the same random numbers in the same order


class SlowLoop:
    """Tabular learning on a grid, one number after the other; as in Sutton & Barto, with time-outs that bootstrap."""

    def __init__(self, world, numbers, *, step_size, epsilon, critic_step_size, time_limit):
        mdp = make_world(world)
        self.terminal, self.start, self.gamma = np.asarray(mdp.terminal), world["start"], world["gamma"]
        self.walls, self.world, self.numbers = {cell(s) for s in world["walls"]}, world, iter(numbers)
        self.alpha, self.epsilon, self.beta, self.limit = step_size, epsilon, critic_step_size, time_limit
        self.table, self.critic = np.zeros((64, 4)), np.zeros(64)

    def move(self, s, a):
        u, slip = next(self.numbers), self.world["slip"]
        a = a if u < 1 - slip else (a - 1) % 4 if u < 1 - slip / 2 else (a + 1) % 4
        row, column = np.add(cell(s), [(0, -1), (1, 0), (0, 1), (-1, 0)][a])
        blocked = not (0 <= row < 8 and 0 <= column < 8) or (row, column) in self.walls
        after = s if blocked else int(8 * row + column)
        gain = {self.world["goal"]: 1.0, self.world["trap"]: -1.0}.get(after, 0.0)
        return after, gain - self.world["livingCost"], bool(self.terminal[after])

    def epsilon_greedy(self, s):
        explores, u = next(self.numbers) < self.epsilon, next(self.numbers)
        best = range(4) if explores else np.flatnonzero(self.table[s] == self.table[s].max())
        return int(best[int(u * len(best))])

    def softmax(self, s):
        weights = np.exp(self.table[s] - self.table[s].max())
        return weights / weights.sum()

    def sample(self, s):
        return min(int(np.searchsorted(self.softmax(s).cumsum(), next(self.numbers), side="right")), 3)

    def episode(self, method):
        s, steps, ended = self.start, [], False
        choose = self.sample if method in ("reinforce", "actor_critic") else self.epsilon_greedy
        a = choose(s) if method == "sarsa" else None
        while not ended and len(steps) < self.limit:
            a = a if method == "sarsa" else choose(s)
            after, reward, ended = self.move(s, a)
            steps.append((s, a, reward))
            if method == "sarsa":
                a_after = 0 if ended else choose(after)
                target = reward + self.gamma * (0 if ended else self.table[after, a_after])
                self.table[s, a] += self.alpha * (target - self.table[s, a])
                a = a_after
            elif method == "q_learning":
                target = reward + self.gamma * (0 if ended else self.table[after].max())
                self.table[s, a] += self.alpha * (target - self.table[s, a])
            elif method == "actor_critic":
                delta = reward + self.gamma * (0 if ended else self.critic[after]) - self.critic[s]
                self.critic[s] += self.beta * delta
                self.table[s] += self.alpha * delta * (np.eye(4)[a] - self.softmax(s))
            s = after
        if method in ("monte_carlo", "reinforce"):
            self.learn_from_episode(method, steps)

    def learn_from_episode(self, method, steps):
        gradient = np.zeros((64, 4))
        for t, (s, a, _) in enumerate(steps):
            G = sum(self.gamma**k * reward for k, (_, _, reward) in enumerate(steps[t:]))
            first = (s, a) not in [(x, y) for x, y, _ in steps[:t]]
            if method == "reinforce":
                gradient[s] += G * (np.eye(4)[a] - self.softmax(s))
            elif first:
                self.table[s, a] += self.alpha * (G - self.table[s, a])
        if method == "reinforce":
            self.table += self.alpha * gradient


@pytest.mark.parametrize("method", ["monte_carlo", "sarsa", "q_learning", "reinforce", "actor_critic"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_learner_is_a_slow_loop(engine, method, request):
    """The tables after eight episodes, some of them cut off, to 1e-9."""
    numbers = np.random.default_rng(7).random(4000)
    world = {**WORLDS["walls"], "start": 23, "gamma": 0.95}
    sizes = {"step_size": 0.4, "epsilon": 0.3, "critic_step_size": 0.2, "time_limit": 60}
    slow = SlowLoop(world, numbers, **sizes)
    tables, critics = [slow.table.copy()], [slow.critic.copy()]
    for _ in range(8):
        slow.episode(method)
        tables.append(slow.table.copy())
        critics.append(slow.critic.copy())
    settings = {
        **{"gamma": 0.95, "stepSize": 0.4, "epsilon": 0.3, "criticStepSize": 0.2},
        **{"timeLimit": 60, "anywhere": False, "episodes": 8},
    }
    random = f"(() => {{ const numbers = {json.dumps(numbers.tolist())}; let i = 0; return () => numbers[i++]; }})()"
    mdp = f"makeMDP({json.dumps({**world, 'rows': 8, 'columns': 8})})"
    steps = f"[...learningSteps('{method}', {mdp}, {json.dumps(settings)}, {random})]"
    code = f"{steps}.map((step) => [[...step.table], [...(step.critic ?? [])], step.end ?? null])"
    learned = run_js(engine, request, code, "solver", "learners")
    np.testing.assert_allclose([table for table, _, _ in learned], np.reshape(tables, (9, 256)), atol=1e-9)
    assert {end for _, _, end in learned[1:]} >= {None, world["goal"]}
    if method == "actor_critic":
        np.testing.assert_allclose([critic for _, critic, _ in learned], critics, atol=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
def test_reinforce_follows_the_gradient_by_finite_differences(engine, request):
    """Of sum_t G_t log pi(a_t|s_t), with states and actions that come twice."""
    table = np.random.default_rng(1).normal(size=(5, 4))
    steps = [(0, 1, 0.5), (2, 3, -1.0), (0, 1, 0.25), (2, 0, 0.0), (4, 2, 1.0)]
    gamma, h = 0.9, 1e-5

    def objective(table):
        log_policy = table - np.log(np.exp(table).sum(-1, keepdims=True))
        G = [sum(gamma**k * reward for k, (_, _, reward) in enumerate(steps[t:])) for t in range(len(steps))]
        return sum(g * log_policy[s, a] for g, (s, a, _) in zip(G, steps, strict=True))

    basis = np.eye(20).reshape(20, 5, 4)
    expected = [(objective(table + h * e) - objective(table - h * e)) / (2 * h) for e in basis]
    given = json.dumps([{"s": s, "a": a, "reward": reward} for s, a, reward in steps])
    code = f"[...reinforceGradient(Float64Array.from({json.dumps(table.ravel().tolist())}), {given}, {gamma})]"
    np.testing.assert_allclose(run_js(engine, request, code, "solver", "learners"), expected, atol=1e-8)


@pytest.mark.parametrize("engine", ENGINES)
def test_random_numbers_are_uniform_and_seeded(engine, request):
    code = "[1, 1, 2].map((seed) => { const random = makeRandom(seed); return Array.from({ length: 4000 }, random); })"
    first, again, other = np.array(run_js(engine, request, code, "solver", "learners"))
    np.testing.assert_array_equal(first, again)
    assert abs(np.corrcoef(first, other)[0, 1]) < 0.06
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.06
    counts = np.histogram(first, 20, (0.0, 1.0))[0]
    assert ((counts - 200) ** 2 / 200).sum() < 45  # chi-squared with 19 degrees of freedom: 0.999 quantile 43.8


@needs_chromium
@pytest.mark.parametrize("method", ["monte_carlo", "sarsa", "q_learning", "reinforce", "actor_critic"])
def test_every_learner_comes_near_the_optimum(method, browser, address):
    page = opened(browser, address, method=method, episodes=1000)
    means, optimum = page.evaluate("document.getElementById('chartSummary').textContent").split("Dashed")
    mean, optimum = (float(text.rstrip(". ").split()[k]) for text, k in ((means.replace(",", ""), 5), (optimum, -1)))
    assert optimum == 0.25
    assert mean > 0.14  # epsilon-greedy wanders off in a tenth of its steps
    assert page.errors == []


@pytest.mark.parametrize("engine", ENGINES)
def test_episodes_may_begin_in_any_cell_that_is_no_end(engine, request):
    world = WORLDS["walls"]
    mdp = f"makeMDP({json.dumps({**world, 'rows': 8, 'columns': 8})})"
    grid = f"makeWorld({mdp}, makeRandom(3), {{ timeLimit: 9, anywhere: true }})"
    starts = run_js(engine, request, f"((w) => Array.from({{ length: 2000 }}, w.reset))({grid})", "solver", "learners")
    assert set(starts) == set(range(64)) - {world["goal"], world["trap"], *world["walls"]}


@needs_chromium
def test_every_best_action_is_an_arrow(browser, address):
    """Of value iteration; policy iteration shows the one that its policy takes."""
    for method, arrows, name in (("value_iteration", 2, "right or up"), ("policy_iteration", 1, "right")):
        page = opened(browser, address, method=method)
        start = "document.querySelectorAll('.cell')[56]"
        assert page.evaluate(f"{start}.getAttribute('aria-label')") == f"start, row 8, column 1, value 0.25, {name}"
        assert page.evaluate(f"{start}.querySelectorAll('.arrow').length") == arrows


# By hand


def value_at(page, state):
    return page.evaluate(f"Number(document.querySelectorAll('.cell')[{state}].dataset.value)")


def all_values(page):
    return page.evaluate("[...document.querySelectorAll('.cell')].map((cell) => Number(cell.dataset.value))")


def middle(page, state):
    box = page.evaluate(
        f"(() => {{ const b = document.querySelectorAll('.cell')[{state}].getBoundingClientRect(); "
        "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
    )
    return tuple(box)


def optimum(**changes):
    return steps_of_jaxpg({**WORLDS["plain"], **changes}, "policy_iteration")[-1].values


def text(page, identifier):
    return page.evaluate(f"document.getElementById('{identifier}').textContent")


@needs_chromium
def test_by_keyboard_alone(page):
    """From the top of the page: the goal is moved, put back, a wall is built; then the steps."""
    page.evaluate("document.activeElement.blur()")
    for _ in range(2):
        page.press("Tab")
    assert page.evaluate("document.activeElement.dataset.state") == "56"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    for key in ["ArrowUp"] * 7 + ["End", "Enter", "ArrowLeft", "ArrowLeft", "Enter"]:
        page.press(key)
    np.testing.assert_allclose(all_values(page), optimum(goal=5), atol=1e-6)
    assert text(page, "live").startswith("The goal is at row 1, column 6.")
    for key in ["Enter", "ArrowDown", "ArrowDown", "Escape"]:
        page.press(key)
    np.testing.assert_allclose(all_values(page), optimum(goal=5), atol=1e-6)
    assert page.evaluate("document.activeElement.dataset.state") == "5"
    for key in ["ArrowDown", " "]:
        page.press(key)
    np.testing.assert_allclose(all_values(page), optimum(goal=5, walls=(13,)), atol=1e-6)
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "wall, row 2, column 6"
    last = int(page.evaluate("document.body.dataset.position"))
    for key in [",", ",", "."]:
        page.press(key)
    assert page.evaluate("document.body.dataset.position") == str(last - 1)
    assert text(page, "live") == text(page, "phase")
    page.press(" ")
    np.testing.assert_allclose(all_values(page), optimum(goal=5), atol=1e-6)


@needs_chromium
def test_pieces_do_not_land_on_each_other(page):
    x, y = middle(page, 7)
    page.mouse("mousePressed", x, y)
    page.mouse("mouseReleased", x, y)
    x, y = middle(page, 27)
    page.mouse("mousePressed", x, y)
    page.mouse("mouseReleased", x, y)
    assert text(page, "live") == "The cell at row 4, column 4 is taken."
    np.testing.assert_allclose(all_values(page), optimum(), atol=1e-6)
    walled = opened(page, page.evaluate("location.href.split('#')[0]"), walls=(6,))
    for key in ["Tab", "Tab", *["ArrowUp"] * 7, "End", "Enter", "ArrowLeft", "Enter"]:
        walled.press(key)
    assert text(walled, "live") == "The cell at row 1, column 7 is taken."
    np.testing.assert_allclose(all_values(walled), optimum(walls=(6,)), atol=1e-6)


@needs_chromium
def test_by_mouse(page):
    """The trap is dragged, and the world is solved at once; the goal is clicked, then a cell; a wall comes and goes."""
    page.mouse("mousePressed", *middle(page, 27))
    page.mouse("mouseMoved", *middle(page, 28))
    np.testing.assert_allclose(all_values(page), optimum(trap=28), atol=1e-6)
    page.mouse("mouseMoved", *middle(page, 20))
    page.mouse("mouseReleased", *middle(page, 20))
    np.testing.assert_allclose(all_values(page), optimum(trap=20), atol=1e-6)
    for state in (7, 0):
        page.mouse("mousePressed", *middle(page, state))
        page.mouse("mouseReleased", *middle(page, state))
    np.testing.assert_allclose(all_values(page), optimum(trap=20, goal=0), atol=1e-6)
    for walls in ((9,), ()):
        page.mouse("mousePressed", *middle(page, 9))
        page.mouse("mouseReleased", *middle(page, 9))
        np.testing.assert_allclose(all_values(page), optimum(trap=20, goal=0, walls=walls), atol=1e-6)
    assert page.errors == []


@needs_chromium
def test_by_touch(page):
    page.touch("touchStart", middle(page, 7))
    page.touch("touchMove", middle(page, 6))
    page.touch("touchMove", middle(page, 14))
    page.touch("touchEnd")
    np.testing.assert_allclose(all_values(page), optimum(goal=14), atol=1e-6)


@needs_chromium
def test_sliders_solve_again(page):
    for name, value in (("gamma", 0.7), ("slip", 0.3), ("livingCost", 0.1)):
        page.evaluate(
            f"(() => {{ const slider = document.getElementById('{name}'); slider.value = {value}; "
            "slider.dispatchEvent(new Event('input')); })()"
        )
    np.testing.assert_allclose(all_values(page), optimum(gamma=0.7, slip=0.3, livingCost=0.1), atol=1e-6)
    page.wait_for("location.hash.includes('slip=0.3')")
    page.evaluate("document.getElementById('reset').click()")
    np.testing.assert_allclose(all_values(page), optimum(), atol=1e-6)


@needs_chromium
def test_it_plays_to_the_end_and_pauses(page):
    page.evaluate(
        "(() => { const speed = document.getElementById('speed'); speed.value = 6; "
        "speed.dispatchEvent(new Event('input')); })()"
    )
    page.press("p")
    assert page.evaluate("document.getElementById('play').getAttribute('aria-label')") == "Pause"
    page.wait_for("document.getElementById('play').getAttribute('aria-label') === 'Play'")
    steps = len(steps_of_jaxpg(WORLDS["plain"], "policy_iteration")) - 1
    assert text(page, "count") == f"step {steps} of {steps}"
    assert text(page, "live").endswith("End.")


@needs_chromium
def test_steps_back_of_a_learner_show_what_it_knew(browser, address):
    """The table after an episode is the same whether the page came to it from before or from behind."""
    page = opened(browser, address, method="q_learning", episodes=50)
    steps = page.evaluate(READ_ALL_STEPS)
    for _ in range(20):
        page.press(",")
    assert text(page, "count") == "episode 30 of 50"
    assert all_values(page) == steps[30][1]
    assert steps[30][1] != steps[50][1]


@needs_chromium
@pytest.mark.parametrize("width", [320, 360, 1280])
def test_nothing_is_wider_than_the_window(width, browser, address):
    for method in ("policy_iteration", "actor_critic"):
        page = opened(browser, address, method=method)
        page.screen(width, 740)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        board = page.evaluate("document.getElementById('board').getBoundingClientRect().width")
        assert board > (0.9 * width if width < 480 else 380)


LUMINANCE = """
((color) => {
  const linear = (x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = color.match(/[\\d.]+/g).map((x) => linear(x / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
})
"""


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_numbers_can_be_read_on_every_colour(dark, browser, address):
    """Contrast of at least 4.5 (WCAG AA), in light and dark; and the page follows the reader's preference."""
    page = opened(browser, address, **WORLDS["slippery"])
    page.screen(1280, 900, dark=dark, still=True)
    contrast = f"""
      [...document.querySelectorAll(".cell")].map((cell) => {{
        const style = getComputedStyle(cell), [a, b] = [style.color, style.backgroundColor].map({LUMINANCE});
        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      }})"""
    page.evaluate("document.getElementById('first').click()")
    assert min(page.evaluate(contrast)) >= 4.5
    page.evaluate("document.getElementById('last').click()")
    assert min(page.evaluate(contrast)) >= 4.5
    assert (page.evaluate(f"{LUMINANCE}(getComputedStyle(document.body).backgroundColor)") < 0.1) == dark
    assert page.evaluate("getComputedStyle(document.querySelector('.cell')).transitionProperty") == "none"


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_paper_the_board_keeps_its_colours_and_the_text_is_dark(scheme, browser, address):
    """Browsers print no backgrounds unless told to: white numbers would be on white."""
    page = opened(browser, address)
    page.call("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": scheme}])
    adjusted = "[...document.querySelectorAll('.cell')].every((x) => getComputedStyle(x).printColorAdjust === 'exact')"
    assert page.evaluate(adjusted)
    assert page.evaluate(f"{LUMINANCE}(getComputedStyle(document.body).color)") < 0.1
    page.call("Emulation.setEmulatedMedia", media="")


@needs_chromium
def test_a_world_without_values_is_explained(browser, address):
    page = opened(browser, address, gamma=1, walls=(48, 57))
    assert text(page, "problem") == (
        "With a discount of 1 every cell needs a way to the goal or the trap, and row 8, column 1 has none."
    )
    assert not page.evaluate("document.getElementById('problem').hidden")


@needs_chromium
@pytest.mark.parametrize(
    "settings",
    [
        {
            "gamma": "x",
            "slip": -1,
            "livingCost": "Infinity",
            "episodes": "1e9",
            "method": "toString",
            "walls": "a.7.-1.99.3e0",
        },
        {"goal": 5, "trap": 5, "seed": "%"},
    ],
)
def test_an_address_without_sense_opens_the_usual_page(settings, browser, address):
    page = opened(browser, address, **settings)
    np.testing.assert_allclose(all_values(page), optimum(walls=(3,) if "walls" in settings else ()), atol=1e-6)
    assert page.errors == []


@needs_chromium
def test_it_requests_nothing(page):
    """Only itself and its empty icon; and the policy of the page forbids more."""
    assert [url for url in page.requests if not url.startswith("data:")] == [page.requests[0]]
    assert page.evaluate("fetch('http://127.0.0.1:1/').then(() => 'sent', (error) => error.name)") == "TypeError"
    assert "default-src 'none'" in gridworld_page()
    assert (
        page.evaluate(
            "[...document.querySelectorAll('button, input, select')].filter((x) => "
            "!x.labels?.length && !x.textContent.trim() && !x.getAttribute('aria-label')).map((x) => x.id)"
        )
        == []
    )


# The command line


def test_the_page_is_one_file(tmp_path, capsys):
    path = tmp_path / "world.html"
    assert main(["gridworld", "--out", str(path)]) == 0
    assert path.read_text(encoding="utf-8") == gridworld_page()
    assert str(path) in capsys.readouterr().out
    page = gridworld_page()
    assert "import {" not in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")


@pytest.fixture
def browser_opens(monkeypatch):
    """Ctrl-C as soon as the page was looked at; the list that is returned says whether a browser opens."""
    opens, addresses = [True], []

    def open_browser(address):
        addresses.append(address)
        return opens[0]

    def look_and_interrupt():
        with urllib.request.urlopen(addresses[0], timeout=5) as answer:
            assert answer.read().decode() == gridworld_page()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{addresses[0]}etc/passwd", timeout=5)
        raise KeyboardInterrupt

    monkeypatch.setattr(gridworld, "_wait", look_and_interrupt)
    monkeypatch.setattr(webbrowser, "open", open_browser)
    return opens


def test_it_is_served_until_interrupted(browser_opens, capsys):
    assert main(["gridworld", "--port", "0"]) == 0
    printed = capsys.readouterr()
    assert "The grid world is at http://127.0.0.1:" in printed.out
    assert printed.err == ""


def test_without_a_browser_it_says_the_address(browser_opens, capsys):
    browser_opens[0] = False
    assert main(["gridworld", "--port", "0"]) == 0
    assert "no browser could be opened; open http://127.0.0.1:" in capsys.readouterr().err


def test_a_browser_is_only_opened_on_request(monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(gridworld, "_wait", interrupt)
    monkeypatch.setattr(webbrowser, "open", lambda address: pytest.fail("a browser was opened"))
    assert main(["gridworld", "--port", "0", "--no-browser"]) == 0


def test_it_listens_on_the_loopback_address_only():
    server = gridworld.make_server("page", 0)
    assert server.server_address[0] == "127.0.0.1"
    server.server_close()


def test_mistakes_are_refused_with_a_sentence(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["gridworld", "--no-browser", "--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"jaxpg: Port {port} is in use. Choose another with --port, or --port 0 for any free one.\n"
    )
    for port in ("65536", "-1"):
        assert main(["gridworld", "--no-browser", "--port", port]) == 2
        assert capsys.readouterr().err == f"jaxpg: --port must be between 0 and 65535, not {port}.\n"
    assert main(["gridworld", "--out", str(tmp_path / "absent" / "page.html")]) == 2
    assert "page.html cannot be written (No such file or directory)" in capsys.readouterr().err
    assert main(["gridworld", "--out", str(tmp_path)]) == 2
    assert "is a directory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_ctrl_c_ends_it_with_success():
    # A test run in the background ignores Ctrl-C, and its children would as well.
    program = "import signal, jaxpg.cli.main as cli; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program += "; raise SystemExit(cli.main(['gridworld', '--port', '0', '--no-browser']))"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **pipes, cwd=Path(__file__).parent.parent) as process:
        try:
            assert process.stdout.readline().startswith("The grid world is at http://127.0.0.1:")
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0
    assert errors == ""


def test_walls_have_no_value_and_may_be_counted_from_the_end():
    """A wall behind walls has no way out; without a discount its living costs would have no end."""
    block = [(row, column) for row in (-1, -2, -3) for column in (5, 6, 7)]
    mdp = envs.grid_world(8, 8, walls=block)
    assert values.value_iteration(mdp, 1.0).sweeps < 200
    plan = values.value_iteration(mdp, 1.0)
    np.testing.assert_array_equal(np.reshape(plan.values, (8, 8))[5:, 5:], 0.0)
    assert not np.asarray(mdp.P)[~np.asarray(mdp.terminal)].reshape(-1, 8, 8)[:, 5:, 5:].any()
