"""GRPO on a language model by jaxpg, TRL or Tunix, one step at a time: the programs of language_turns.py.

    PEER/bin/python benchmarks/language_peers.py NAME SETTING WORK

NAME is one of PROGRAMS, SETTING one of its SETTINGS, WORK the fields of `Work` as JSON. The process takes WARM_UP
steps, prints a line of JSON, then takes a step for each line that it reads and prints what the step cost. Each program
is the library's own training loop, held up between its steps. What goes beyond Python is imported where it is used: the
peers' environments have no jaxpg, and TRL's no jax.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from versions import versions

WARM_UP = 1
"""Steps before the first that is asked for: they compile."""
MANY = 10**9
PACKAGES = ("jax", "jaxlib", "flax", "torch", "transformers", "trl", "google-tunix")
FIRST = ord("0")
"""The character of token 0. Token i is the i-th character from it on, so a text has one token per character."""


class Work(NamedTuple):
    """What all programs do.

    width, layers, heads, kv_heads, hidden, vocabulary: of the model; `hidden` is the width of the SwiGLU layer.
    prompt, tokens: length of every prompt and of every completion.
    columns, group: completions of a step, and of each of its prompts.
    learning_rate, max_grad_norm: of Adam.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    prompt: int
    tokens: int
    columns: int
    group: int
    learning_rate: float
    max_grad_norm: float


def even_share(tokens: Sequence[int]) -> float:
    """The reward of a completion: the share of its tokens that are even."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


def prompts(work: Work) -> Iterator[str]:
    """Random ones, without end."""
    numbers = random.Random(0)
    while True:
        yield "".join(chr(FIRST + numbers.randrange(2, work.vocabulary)) for _ in range(work.prompt))


def cpu_seconds() -> float:
    """Of this process, with all of its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Turns:
    """Holds a training loop up between its steps, judges its completions, and says what a step cost.

    weights: of the model; the program says so before its first step.
    """

    def __init__(self, work: Work) -> None:
        self.answers, sys.stdout = sys.stdout, sys.stderr  # libraries print
        self.work, self.weights, self.steps = work, 0, -1
        self.begun = self.written = (0.0, 0.0)
        self.reward = 0.0

    def judge(self, completions: Sequence[Sequence[int]]) -> list[float]:
        """The rewards of all completions of a step."""
        self.written = self._now()
        rewards = [even_share(tokens) for tokens in completions]
        assert [len(tokens) for tokens in completions] == [self.work.tokens] * self.work.columns
        self.reward = sum(rewards) / len(rewards)
        return rewards

    def pause(self) -> bool:
        """Called before the first step and after every one: whether to go on, once that is asked for."""
        ended = self._now()
        self.steps += 1
        if self.steps < WARM_UP:
            return True
        if self.steps == WARM_UP:
            self._answer({"work": 1, "bytes": 0, "versions": versions(PACKAGES), "weights": self.weights})
        else:
            cpu, wall = (after - before for before, after in zip(self.begun, ended, strict=True))
            writing = self.written[0] - self.begun[0]
            self._answer({"cpu": cpu, "wall": wall, "writing_cpu": writing, "reward": self.reward})
        asked = sys.stdin.readline()
        self.begun = self._now()
        return bool(asked)

    def _now(self) -> tuple[float, float]:
        return cpu_seconds(), time.perf_counter()

    def _answer(self, answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=self.answers, flush=True)


def jaxpg(setting: str, work: Work, turns: Turns) -> None:
    """The loop of `jaxpg train`, an iteration of GRPO at a time; the reward is called from within the program."""
    import jax
    from language import endless, judged_on_host, learner_of
    from workloads import learner_loop

    from jaxpg import language

    jax.config.update("jax_enable_compilation_cache", False)
    env = judged_on_host(endless(), turns.judge)
    shape = {name: getattr(work, name) for name in ("width", "layers", "heads", "kv_heads")}
    policy, critic = language.transformer(env, **shape)
    settings = {"learning_rate": work.learning_rate, "max_grad_norm": work.max_grad_norm}
    learner = learner_of(policy, critic, env, work.columns, **settings)
    params = jax.eval_shape(policy.init, jax.random.key(0))
    turns.weights = sum(x.size for x in jax.tree.leaves(params))
    program = learner_loop(env, learner, work.columns, 1, 1).build()
    while turns.pause():
        jax.block_until_ready(program.run())


def trl(setting: str, work: Work, turns: Turns) -> None:
    """TRL's GRPOTrainer on transformers' Llama.

    SETTING: the attention, the completions of a gradient's part, and "compiled" for torch.compile of the learning.
    """
    import torch
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    attention, part, *compiled = setting.split()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=work.vocabulary,
        hidden_size=work.width,
        intermediate_size=work.hidden,
        num_hidden_layers=work.layers,
        num_attention_heads=work.heads,
        num_key_value_heads=work.kv_heads,
        max_position_embeddings=work.prompt + work.tokens,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=attention,
    )
    model = LlamaForCausalLM(shape)
    turns.weights = sum(x.numel() for x in model.parameters())
    given = prompts(work)
    data = Dataset.from_dict({"prompt": [next(given) for _ in range(4096)]})

    class Pause(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.pause()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = not turns.pause()

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return turns.judge(completion_ids)

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(**trl_settings(work, int(part)), torch_compile=bool(compiled)),
        train_dataset=data,
        processing_class=trl_tokenizer(work),
        callbacks=[Pause()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def trl_settings(work: Work, part: int) -> dict[str, Any]:
    """Of GRPOConfig: the algorithm, then what would only cost time, switched off."""
    return {
        "per_device_train_batch_size": part,
        "gradient_accumulation_steps": work.columns // part,
        "num_generations": work.group,
        "num_iterations": 1,
        "max_completion_length": work.tokens,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "beta": 0.0,
        "loss_type": "grpo",
        "learning_rate": work.learning_rate,
        "lr_scheduler_type": "constant",
        "max_grad_norm": work.max_grad_norm,
        "max_steps": MANY,
        "use_cpu": True,
        "bf16": False,
        "use_vllm": False,
        "gradient_checkpointing": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def trl_tokenizer(work: Work) -> Any:
    """A token per character. Padding and the end are tokens that the model does not have, so it never ends early."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {chr(FIRST + i): i for i in range(work.vocabulary)} | {
        "<pad>": work.vocabulary,
        "<end>": work.vocabulary + 1,
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


class Characters:
    """A tokenizer as Tunix takes it: a token per character; padding and the end are tokens that the model lacks."""

    def __init__(self, work: Work) -> None:
        self.vocabulary = work.vocabulary

    def encode(self, text: str) -> list[int]:
        return [ord(character) - FIRST for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(FIRST + token) for token in tokens)

    def bos_id(self) -> None:
        return None

    def eos_id(self) -> int:
        return self.vocabulary + 1

    def pad_id(self) -> int:
        return self.vocabulary


def tunix(setting: str, work: Work, turns: Turns) -> None:
    """Tunix's GRPOLearner on its Llama, with its own sampler. SETTING: the completions of a gradient's part."""
    import jax
    import numpy as np
    from flax import nnx
    from tunix.models.llama3.model import Llama3, ModelConfig
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rl_cluster import RLCluster

    shape = ModelConfig(
        num_layers=work.layers,
        vocab_size=work.vocabulary,
        embed_dim=work.width,
        hidden_dim=work.hidden,
        num_heads=work.heads,
        head_dim=work.width // work.heads,
        num_kv_heads=work.kv_heads,
        rope_theta=10_000,
        norm_eps=1e-6,
    )
    model = Llama3(shape, rngs=nnx.Rngs(0))
    turns.weights = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    tokenizer = Characters(work)
    cluster = RLCluster(actor=model, tokenizer=tokenizer, cluster_config=tunix_settings(work, int(setting)))

    def reward(prompts: Any, completions: list[str], **_: Any) -> list[float]:
        return turns.judge([tokenizer.encode(text) for text in completions])

    def batches() -> Iterator[dict[str, Any]]:
        given = prompts(work)
        while True:
            batch = [next(given) for _ in range(work.columns // work.group)]
            jax.block_until_ready(nnx.state(model, nnx.Param))  # the update before it may still run
            if not turns.pause():
                return
            yield {"prompts": np.array(batch)}

    grpo = GRPOConfig(num_generations=work.group, num_iterations=1, beta=0.0, epsilon=0.2)
    learner = GRPOLearner(rl_cluster=cluster, algo_config=grpo, reward_fns=reward)
    learner.train(batches())


def tunix_settings(work: Work, part: int) -> Any:
    """Of its RLCluster: model and sampler on one device, all completions written at once."""
    import jax
    import numpy as np
    import optax
    from tunix.rl.rl_cluster import ClusterConfig, RLTrainingConfig, Role
    from tunix.rl.rollout.base_rollout import RolloutConfig

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    groups = work.columns // work.group
    adam = optax.chain(optax.clip_by_global_norm(work.max_grad_norm), optax.adam(work.learning_rate))
    training = RLTrainingConfig(
        actor_optimizer=adam,
        eval_every_n_steps=MANY,
        max_steps=MANY,
        mini_batch_size=groups,
        train_micro_batch_size=part // work.group,
        rollout_micro_batch_size=groups,
        compute_logps_micro_batch_size=groups,
    )
    rollout = RolloutConfig(
        max_tokens_to_generate=work.tokens,
        max_prompt_length=work.prompt,
        kv_cache_size=work.prompt + work.tokens,
        temperature=1.0,
        top_p=1.0,
    )
    roles = dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh)
    return ClusterConfig(role_to_mesh=roles, training_config=training, rollout_config=rollout)


PROGRAMS: dict[str, Callable[[str, Work, Turns], None]] = {"jaxpg": jaxpg, "trl": trl, "tunix": tunix}


def main() -> None:
    """Serve the program that the arguments name."""
    name, setting, work = sys.argv[1:]
    given = Work(**json.loads(work))
    PROGRAMS[name](setting, given, Turns(given))


if __name__ == "__main__":
    main()
