"""The same inputs through TRL's own trainers, and the numbers that come out: losses, gradients, advantages.

TRL makes its tensors itself, from scripted rollouts and rewards. Where the two differ by design, the test is named
after the difference and asserts what relates the two. B: sequences; T: padded tokens in TRL, trained tokens in ours.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers import PreTrainedTokenizerFast as Tokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from groupwise.algorithms import kl
from groupwise.algorithms.advantages import batch_advantages, part_advantages, whiten
from groupwise.algorithms.losses import policy_loss
from groupwise.algorithms.presets import Algorithm
from groupwise.algorithms.selection import select_tokens
from groupwise.algorithms.weights import token_weights
from groupwise.batch import Batch, Segment
from groupwise.model import Policy
from groupwise.tiny import tiny_tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that it is experimental
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func'"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]

EXACT = 1e-9
FLOAT32 = 1e-5
"""TRL's language-model head works in float32 whatever the model's dtype."""
TERM = 0.1
"""A loss is a mean of terms of this size or more, whose rounding stays when they cancel."""

WIDTH = 7
"""The longest completion, and TRL's max_completion_length."""
EOS = tiny_tokenizer().eos_token_id
PROMPTS = [[65, 66, 67, 68, 69], [65, 66, 67], [70, 71, 72, 73], [70, 71], [80, 81, 82, 83], [80]]
COMPLETIONS = [
    [97, 98, 99, 100, 101, 102, EOS],
    [103, 104, 105],  # cut off
    [106, 107, 108, 109, EOS],
    [EOS],
    [110, 111, 112, 113, 114, 115],  # cut off
    [116, 117, 118, EOS],
]
CUT_OFF = [1, 4]
LENGTHS = [len(ids) for ids in COMPLETIONS]
B = len(LENGTHS)
ADVANTAGES = [1.3, -0.7, 0.4, -1.1, 0.0, -0.5]
HALVES = (slice(0, B // 2), slice(B // 2, B))
"""Two micro-batches."""

TRL_SCALING: dict[str, Any] = {"ddof": 1, "eps": 1e-4}
"""How TRL divides by a deviation, in our terms."""

Build = Callable[..., Any]
Inputs = dict[str, Any]
Column = Sequence[float | None]


# -- both sides ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """The log-probs of the scripted rollouts under every policy, [B, T] in float64 with zeros as padding."""

    logp: Tensor
    entropy: Tensor
    old: Tensor
    ref: Tensor
    sampler: Tensor
    """Representable in float32, which TRL makes of it."""
    mask: Tensor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, llama: Callable[..., LlamaForCausalLM]) -> Path:
    path = tmp_path_factory.mktemp("model")
    llama().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def scene(folder: Path) -> Scene:
    """Policies far enough apart that every bound is at work somewhere, and nowhere everywhere."""
    with torch.no_grad():
        logp, entropy = plain_forward(load(folder), PROMPTS, COMPLETIONS)
    mask = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
    generator = torch.Generator().manual_seed(3)

    def near(x: Tensor, spread: float) -> Tensor:
        return torch.where(mask, x + spread * torch.randn(x.shape, generator=generator, dtype=x.dtype), 0)

    old = near(logp, 0.25)
    return Scene(logp, entropy, old, near(logp, 0.3), near(old, 0.15).float().double(), mask)


@pytest.fixture
def build(folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> Build:
    """TRL's trainers on the small model in float64, as they are in the middle of a training run."""

    def make(
        kind: type[GRPOTrainer] | type[RLOOTrainer] = GRPOTrainer,
        rollouts: Callable[..., Mapping[str, Any]] | None = None,
        parts: Sequence[str] = ("total",),
        vllm: bool = False,
        **settings: Any,
    ) -> Any:
        defaults = {"per_device_train_batch_size": B, "num_generations": 2, "max_completion_length": WIDTH}
        quiet = {"report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True}
        configs = {GRPOTrainer: GRPOConfig, RLOOTrainer: RLOOConfig, GMPOTrainer: GMPOConfig}
        more = {} if kind is RLOOTrainer else {"rollout_func": rollouts or scripted()}
        trainer = kind(
            model=load(folder),
            reward_funcs=[read_column(name) for name in parts],
            args=configs[kind](output_dir=str(tmp_path), **{**defaults, **quiet, **settings}),
            train_dataset=Dataset.from_list([{"prompt": "?"}]),
            processing_class=tokenizer,
            **more,
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps  # as its loop sets it
        if vllm:  # its correction is TRL's own; the log-probs to correct for are the script's
            trainer.use_vllm, trainer._last_loaded_step = True, trainer.state.global_step
        return trainer

    return make


def load(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)


def scripted(sampler: Tensor | None = None) -> Callable[..., Mapping[str, Any]]:
    """A sampler that always answers with `COMPLETIONS`."""
    logprobs = None if sampler is None else [row[:n].tolist() for row, n in zip(sampler, LENGTHS, strict=True)]

    def rollouts(prompts: list[str], trainer: GRPOTrainer) -> Mapping[str, Any]:
        return {"prompt_ids": PROMPTS, "completion_ids": COMPLETIONS, "logprobs": logprobs}

    return rollouts


def read_column(name: str) -> Callable[..., list[float | None]]:
    """A reward function that finds the rewards in the data."""

    def reward(**columns: Any) -> list[float | None]:
        return columns[name]

    reward.__name__ = name
    return reward


def rows(**columns: Column) -> list[Inputs]:
    """TRL's data: one row per completion, with the rewards that it will be given."""
    return [
        {"prompt": "?", **dict(zip(columns, values, strict=True))} for values in zip(*columns.values(), strict=True)
    ]


@contextmanager
def given(trainer: Any, logp: Tensor, entropy: Tensor | None = None, ref: Tensor | None = None) -> Iterator[None]:
    """Lets TRL's forward return these numbers, which may be float64, and leaves all that it does with them."""

    def forward(model: PreTrainedModel, *inputs: Any, **options: Any) -> tuple[Tensor | None, Tensor | None, None]:
        return (ref if ref is not None and model is trainer.ref_model else logp), entropy, None

    trainer._get_per_token_logps_and_entropies = forward
    yield
    del trainer._get_per_token_logps_and_entropies  # and the method of the class shows again


def trl_inputs(trainer: Any, scene: Scene, advantages: Sequence[float] = ADVANTAGES) -> Inputs:
    """What TRL's own generation makes of the scripted rollouts, sampled by the scene's old policy."""
    with given(trainer, scene.old, ref=scene.ref), torch.no_grad():
        made = trainer._generate_and_score_completions(rows(total=[0.0] * B))
    assert made["completion_ids"].shape == (B, WIDTH)
    return {**made, "advantages": torch.tensor(advantages, dtype=torch.float64)}


def numbers(
    logp: Tensor, *, mask: Tensor | None = None, advantages: Sequence[float] = (), **tensors: Tensor
) -> tuple[Tensor, Inputs]:
    """Inputs of TRL's loss for log-probs that no model needs to have computed; the log-probs first."""
    mask = torch.ones_like(logp, dtype=torch.long) if mask is None else mask.long()
    ids = torch.zeros_like(mask)
    made = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask}
    more = {"advantages": torch.tensor(advantages, dtype=torch.float64), "num_items_in_batch": mask.sum()}
    return logp.clone().requires_grad_(), {**made, **more, **tensors}


def trl_loss(trainer: Any, inputs: Inputs, logp: Tensor, entropy: Tensor | None = None) -> Tensor:
    """TRL's loss at these log-probs."""
    with given(trainer, logp, torch.zeros_like(logp) if entropy is None else entropy):
        return trainer._compute_loss(trainer.model, inputs)


def our_loss(
    cfg: Algorithm,
    inputs: Inputs,
    logp: Tensor,
    entropy: Tensor | None = None,
    sampler: Tensor | None = None,
    weights: Sequence[float] | None = None,
) -> Tensor:
    """Our loss of the same step; `weights` are those of its sequences where they are not the whole step."""
    mask = inputs["completion_mask"].bool()
    lengths = mask.sum(1).tolist()
    weights = token_weights(lengths, cfg.weighting, WIDTH) if weights is None else weights

    def per_token(values: Sequence[float] | Tensor) -> Tensor:
        return torch.as_tensor(values, dtype=torch.float64)[:, None].expand(mask.shape)[mask]

    ref = inputs.get("ref_per_token_logps")
    old_T, advantage_T = inputs["old_per_token_logps"].double()[mask], per_token(inputs["advantages"])
    entropy_T = None if entropy is None else entropy[mask]
    selected_T = None
    if cfg.selection != "all":
        assert entropy_T is not None
        selected_T = select_tokens(
            cfg, logp_T=logp[mask].detach(), advantage_T=advantage_T, entropy_T=entropy_T.detach(), seed=0
        )
    return policy_loss(
        logp[mask],
        old_T,
        advantage_T,
        per_token(weights),
        cfg=cfg,
        segment_T=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        ref_logp_T=None if ref is None else ref.double()[mask],
        sampler_logp_T=None if sampler is None else sampler[mask],
        entropy_T=entropy_T,
        selected_T=selected_T,
    )[0]


def plain_forward(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [B, T] by one unpadded forward per sequence and a log-softmax in float64."""
    width = max(map(len, completions))
    logps, entropies = [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        logp_TV = torch.log_softmax(logits.double() / temperature, dim=-1)
        padding = (0, width - len(completion))
        chosen = logp_TV.gather(1, torch.tensor(completion)[:, None]).squeeze(1)
        logps.append(torch.nn.functional.pad(chosen, padding))
        entropies.append(torch.nn.functional.pad(-(logp_TV.exp() * logp_TV).sum(-1), padding))
    return torch.stack(logps), torch.stack(entropies)


def part(inputs: Inputs, half: slice) -> Inputs:
    """A micro-batch."""
    return {k: v[half] if v.dim() else v for k, v in inputs.items()}


def nudge(model: PreTrainedModel, seed: int, size: float = 0.01) -> None:
    """What an optimiser step might do."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += size * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)


def slopes(loss: Tensor, *leaves: Tensor) -> Tensor:
    """The gradient with respect to all leaves, as one vector; zero where the loss does not depend on a leaf."""
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    parts = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
    return torch.cat([g.double().flatten() for g in parts])


def distance(found: Tensor, wanted: Tensor, at_least: float = 0.0) -> float:
    """Relative to the size of what is wanted, or to `at_least`."""
    return float((found.detach() - wanted.detach()).norm() / wanted.detach().norm().clamp(min=at_least))


# -- the losses ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """TRL's settings and the algorithm of ours that they name."""

    trl: Mapping[str, Any]
    ours: Algorithm
    sampler: bool = False
    """The sampler's log-probs are known."""
    kind: type[GRPOTrainer] = GRPOTrainer

    @property
    def vllm(self) -> bool:
        return self.ours.sampler_correction != "none"


def case(trl: Mapping[str, Any], algorithm: str = "grpo", *, sampler: bool = False, **parts: Any) -> Case:
    """The preset of ours without KL unless it is asked for."""
    cfg = Algorithm(**{"algorithm": algorithm, "kl_coef": 0.0, **parts})
    return Case(trl, cfg, sampler or cfg.sampler_correction != "none")


GRPO = {"loss_type": "grpo"}
SINGLE_TEMPERATURES = (1.0, torch.tensor(1.05).item())
"""SAPO's defaults as TRL computes with them: rounded to float32, whatever the log-probs are."""
SEQUENCE = {"importance_sampling_level": "sequence", "epsilon": 0.01, "epsilon_high": 0.06}
SEQUENCE_CLIP: dict[str, Any] = {"clip_range": 0.01, "clip_range_high": 0.06}
CISPO = {"loss_type": "cispo", "epsilon_high": 1.2}
CISPO_CAP: dict[str, Any] = {"clip_range": 1.0, "clip_range_high": 0.2}
KL = {"beta": 0.04, "use_bias_correction_kl": False}
CORRECTED = {"vllm_importance_sampling_clip_max": 1.1, "vllm_importance_sampling_clip_min": 0.9}
BOUNDS: dict[str, Any] = {"sampler_cap": 1.1, "sampler_floor": 0.9}


def corrected(mode: str, **changes: Any) -> dict[str, Any]:
    return {"vllm_importance_sampling_mode": mode, **CORRECTED, **changes}


CASES: dict[str, Case] = {
    "grpo": case(GRPO),
    "grpo, clip-higher": case({**GRPO, "epsilon": 0.1, "epsilon_high": 0.28}, clip_range=0.1, clip_range_high=0.28),
    "grpo, delta": case({**GRPO, "delta": 1.25}, dual_clip=1.25),
    "grpo, KL": case({**GRPO, **KL}, kl_coef=0.04),
    "grpo, bias-corrected KL": case({**GRPO, "beta": 0.04}, kl_coef=0.04, kl_gradient="weighted"),
    "dr_grpo": case({"loss_type": "dr_grpo"}, "dr_grpo"),
    "dr_grpo, KL": case({"loss_type": "dr_grpo", **KL}, "dr_grpo", kl_coef=0.04),
    "dapo": case({"loss_type": "dapo", "epsilon_high": 0.28}, "dapo"),
    "dapo, KL": case({"loss_type": "dapo", "epsilon_high": 0.28, **KL}, "dapo", kl_coef=0.04),
    "bnpo": case({"loss_type": "bnpo"}, "bnpo"),
    "gspo": case({**GRPO, **SEQUENCE}, "gspo", **SEQUENCE_CLIP),
    "gspo, KL": case({**GRPO, **SEQUENCE, **KL}, "gspo", kl_coef=0.04, **SEQUENCE_CLIP),
    "dapo with sequence ratios": case({"loss_type": "dapo", **SEQUENCE}, "dapo", ratio="sequence", **SEQUENCE_CLIP),
    "luspo": case({"loss_type": "luspo", **SEQUENCE}, "luspo", **SEQUENCE_CLIP),
    "luspo, KL": case({"loss_type": "luspo", **SEQUENCE, **KL}, "luspo", kl_coef=0.04, **SEQUENCE_CLIP),
    "luspo with token ratios": case(
        {"loss_type": "luspo"}, "luspo", ratio="token", clip_range=0.2, clip_range_high=0.2
    ),
    "cispo": case(CISPO, "cispo", **CISPO_CAP),
    "cispo, KL": case({**CISPO, **KL}, "cispo", kl_coef=0.04, **CISPO_CAP),
    "cispo with sequence ratios": case(
        {**SEQUENCE, "loss_type": "cispo", "epsilon_high": 1.04}, "cispo", ratio="sequence", clip_range_high=0.04
    ),
    "sapo": case({"loss_type": "sapo"}, "sapo", sapo_temperatures=SINGLE_TEMPERATURES),
    "sapo, other temperatures": case(
        {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
        "sapo",
        sapo_temperatures=(2.0, 3.0),
    ),
    "sapo with sequence ratios": case(
        {**SEQUENCE, "loss_type": "sapo"}, "sapo", ratio="sequence", sapo_temperatures=SINGLE_TEMPERATURES
    ),
    "vespo": case({"loss_type": "vespo"}, "vespo"),
    "vespo, other shapes": case(
        {
            "loss_type": "vespo",
            "vespo_k_pos": 1.5,
            "vespo_lambda_pos": 2.5,
            "vespo_k_neg": 2.5,
            "vespo_lambda_neg": 1.5,
        },
        "vespo",
        vespo_positive=(1.5, 2.5),
        vespo_negative=(2.5, 1.5),
    ),
    "vespo, corrected for the sampler": case(
        {
            "loss_type": "vespo",
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": 100.0,
        },
        "vespo",
        sampler_correction="token_truncate",
        sampler_cap=100.0,
    ),
    "top entropy": case(
        {**GRPO, **KL, "top_entropy_quantile": 0.3}, selection="top_entropy", selection_share=0.3, kl_coef=0.04
    ),
    "top entropy, gspo": case(
        {**GRPO, **SEQUENCE, "top_entropy_quantile": 0.3},
        "gspo",
        selection="top_entropy",
        selection_share=0.3,
        **SEQUENCE_CLIP,
    ),
    "off-policy mask": case({**GRPO, **KL, "off_policy_mask_threshold": 0.02}, off_policy_limit=0.02, kl_coef=0.04),
    "off-policy mask since sampling": case(
        {**GRPO, "off_policy_mask_threshold": 0.02}, off_policy_limit=0.02, sampler=True
    ),
    "token truncation": case({**GRPO, **corrected("token_truncate")}, sampler_correction="token_truncate", **BOUNDS),
    "token mask": case({**GRPO, **corrected("token_mask")}, sampler_correction="token_mask", **BOUNDS),
    "sequence truncation": case(
        {**GRPO, **corrected("sequence_truncate")}, sampler_correction="sequence_truncate", **BOUNDS
    ),
    "sequence mask": case({**GRPO, **corrected("sequence_mask")}, sampler_correction="sequence_mask", **BOUNDS),
    "sequence mask without a floor": case(
        {**GRPO, **corrected("sequence_mask", vllm_importance_sampling_clip_min=None)},
        sampler_correction="sequence_mask",
        sampler_cap=1.1,
    ),
    "token truncation, gspo and KL": case(
        {**GRPO, **SEQUENCE, **KL, **corrected("token_truncate")},
        "gspo",
        sampler_correction="token_truncate",
        kl_coef=0.04,
        **SEQUENCE_CLIP,
        **BOUNDS,
    ),
    "sequence truncation, cispo": case(
        {**CISPO, **corrected("sequence_truncate")},
        "cispo",
        sampler_correction="sequence_truncate",
        **CISPO_CAP,
        **BOUNDS,
    ),
    "entropy bonus": case({"loss_type": "dapo", "epsilon_high": 0.28, "entropy_coef": 0.01}, "dapo", entropy_coef=0.01),
    "entropy bonus, bnpo": case({"loss_type": "bnpo", "entropy_coef": 0.02}, "bnpo", entropy_coef=0.02),
    "everything": case(
        {
            **corrected("token_mask"),
            "loss_type": "dapo",
            "epsilon_high": 0.22,
            "delta": 1.25,
            "beta": 0.04,
            "top_entropy_quantile": 0.5,
            "off_policy_mask_threshold": 0.02,
        },
        "dapo",
        clip_range_high=0.22,
        dual_clip=1.25,
        kl_coef=0.04,
        kl_gradient="weighted",
        selection="top_entropy",
        selection_share=0.5,
        off_policy_limit=0.02,
        sampler_correction="token_mask",
        **BOUNDS,
    ),
    "gmpo": Case({"epsilon": 0.1, "epsilon_high": 0.1}, Algorithm(algorithm="gmpo", clip_range=0.1), kind=GMPOTrainer),
    "gmpo, KL": Case(
        {"epsilon": 0.1, "epsilon_high": 0.2, "beta": 0.04},
        Algorithm(algorithm="gmpo", clip_range=0.1, clip_range_high=0.2, kl_coef=0.04),
        kind=GMPOTrainer,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_trl(name: str, build: Build, scene: Scene) -> None:
    now = CASES[name]
    sampler = scene.sampler if now.sampler else None
    # Two iterations over the samples, or TRL takes the old policy to be the policy.
    trainer = build(now.kind, rollouts=scripted(sampler), vllm=now.vllm, num_iterations=2, **now.trl)
    inputs = trl_inputs(trainer, scene)
    assert torch.equal(inputs["old_per_token_logps"], scene.old)
    assert ("ref_per_token_logps" in inputs) == (now.ours.kl_coef > 0)

    # From the log-probs on, in float64.
    logp, entropy = scene.logp.clone().requires_grad_(), scene.entropy.clone().requires_grad_()
    theirs = trl_loss(trainer, inputs, logp, entropy)
    ours = our_loss(now.ours, inputs, logp, entropy, sampler)
    assert distance(theirs, ours) < EXACT
    assert distance(slopes(theirs, logp, entropy), slopes(ours, logp, entropy)) < EXACT

    # From the weights on, by TRL's own forward.
    weights = list(trainer.model.parameters())
    theirs = trainer._compute_loss(trainer.model, inputs)
    ours = our_loss(now.ours, inputs, *plain_forward(trainer.model, PROMPTS, COMPLETIONS), sampler)
    assert distance(theirs, ours, TERM) < FLOAT32
    assert distance(slopes(theirs, *weights), slopes(ours, *weights)) < FLOAT32


def test_every_bound_is_at_work_somewhere_and_nowhere_everywhere(scene: Scene) -> None:
    def mixed(x: Tensor) -> bool:
        return bool(x.any() and not x.all())

    per_sequence = torch.tensor(ADVANTAGES)
    per_token = per_sequence[:, None].expand(B, WIDTH)[scene.mask]
    log_ratio, lengths = scene.logp - scene.old, torch.tensor(LENGTHS)
    for log_rho, advantage, low, high in [
        (log_ratio[scene.mask], per_token, 0.8, 1.2),
        (log_ratio.sum(1) / lengths, per_sequence, 0.99, 1.06),
        (log_ratio.sum(1), per_sequence, 0.95, 1.45),
    ]:
        assert mixed(log_rho[advantage > 0].exp() > high)
        assert mixed(log_rho[advantage < 0].exp() < low)
    assert mixed(log_ratio[scene.mask][per_token < 0].exp() > 1.25)  # the dual clip
    gap = scene.old - scene.sampler
    for log_w in (gap[scene.mask], gap.sum(1)):
        assert mixed(log_w.exp() < 0.9) and mixed(log_w.exp() > 1.1)
    for behaviour in (scene.old, scene.sampler):
        fell = (behaviour - scene.logp).sum(1) / lengths
        assert mixed(fell[per_sequence < 0] > 0.02)


def test_every_case_above_is_another_loss(build: Build, scene: Scene) -> None:
    """So no setting goes unnoticed."""
    inputs = {**trl_inputs(build(num_iterations=2), scene), "ref_per_token_logps": scene.ref}
    losses = {
        name: float(our_loss(now.ours, inputs, scene.logp, scene.entropy, scene.sampler if now.sampler else None))
        for name, now in CASES.items()
    }
    alike = [pair for pair in itertools.combinations(losses, 2) if math.isclose(*map(losses.__getitem__, pair))]
    assert alike == []


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo", "dapo, KL", "gmpo"])
def test_micro_batches_of_trl_add_up_to_our_step(name: str, build: Build, scene: Scene) -> None:
    now = CASES[name]
    trainer = build(
        now.kind, num_iterations=2, per_device_train_batch_size=B // 2, gradient_accumulation_steps=2, **now.trl
    )
    inputs = trl_inputs(trainer, scene)
    logp = scene.logp.clone().requires_grad_()
    theirs = sum(trl_loss(trainer, part(inputs, half), logp[half], scene.entropy[half]) for half in HALVES)
    ours = our_loss(now.ours, inputs, logp)
    assert distance(theirs, ours) < EXACT
    assert distance(slopes(theirs, logp), slopes(ours, logp)) < EXACT


def test_log_probs_and_entropies_are_those_of_trl(
    build: Build, llama: Callable[..., LlamaForCausalLM], tokenizer: Tokenizer
) -> None:
    trainer = build(temperature=0.7)
    ids = [torch.tensor([*p, *c]) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    segments = [Segment(prompt_ids=tuple(p), token_ids=tuple(c)) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    ours = Policy(llama(), tokenizer).token_logprobs(Batch.of(segments), temperature=0.7, entropy=True)
    theirs = []
    for tokens, length in zip(ids, LENGTHS, strict=True):
        row = tokens[None]
        theirs.append(
            trainer._get_per_token_logps_and_entropies(
                trainer.model, row, torch.ones_like(row), length, compute_entropy=True
            )
        )
    for i in range(2):
        assert distance(ours[i].double(), torch.cat([x[i][0] for x in theirs]).double()) < FLOAT32


def test_a_whole_step_is_that_of_trl(folder: Path, build: Build, scene: Scene) -> None:
    """From rollouts, rewards and the weights of three policies to the gradient; TRL computes all of its own."""
    settings = {**corrected("token_truncate"), "loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.04}
    trainer = build(
        rollouts=scripted(scene.sampler), vllm=True, num_iterations=2, num_generations=3, temperature=0.8, **settings
    )
    totals = [1.0, 0.0, 0.25, None, 2.0, -1.0]
    reference = load(folder)
    nudge(trainer.model, seed=1)
    with torch.no_grad():
        old, _ = plain_forward(trainer.model, PROMPTS, COMPLETIONS, temperature=0.8)
        ref, _ = plain_forward(reference, PROMPTS, COMPLETIONS, temperature=0.8)
        inputs = trainer._generate_and_score_completions(rows(total=totals))
    nudge(trainer.model, seed=2)
    weights = list(trainer.model.parameters())
    theirs = trainer._compute_loss(trainer.model, inputs)

    cfg = Algorithm(
        algorithm="dapo",
        kl_coef=0.04,
        kl_gradient="weighted",
        sampler_correction="token_truncate",
        **BOUNDS,
        **TRL_SCALING,
    )
    advantages = flat(batch_advantages([totals[:3], totals[3:]], cfg=cfg))
    mine = {
        "completion_mask": scene.mask,
        "advantages": [a or 0.0 for a in advantages],
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
    }
    logp, _ = plain_forward(trainer.model, PROMPTS, COMPLETIONS, temperature=0.8)
    ours = our_loss(cfg, mine, logp, sampler=scene.sampler)
    assert distance(theirs, ours, TERM) < FLOAT32
    assert distance(slopes(theirs, *weights), slopes(ours, *weights)) < FLOAT32


# -- the advantages --------------------------------------------------------------------------------------------------

TOTALS: list[list[float | None]] = [
    [1.0, 0.0, 0.0, 1.0],
    [0.1, 0.1, 0.1, 0.1],  # no spread
    [2.0, None, 0.5, -1.0],
    [None, 3.0, None, None],  # nobody to compare with
    [None, None, None, None],
    [0.3, 0.7, 0.2, 0.2],
]
FORMATS: list[list[float | None]] = [
    [0.0, 1.0, 0.0, 1.0],
    [1.0, 1.0, 1.0, 0.0],
    [None, None, 0.0, 1.0],
    [0.5, 0.0, 1.0, None],
    [None, None, None, None],
    [1.0, 1.0, 1.0, 1.0],
]
SHARES = {"total": 2.0, "format": 0.5}
SIZE = len(TOTALS[0])


def flat(groups: Sequence[Sequence[Any]]) -> list[Any]:
    return [x for group in groups for x in group]


def weighted_totals() -> list[list[float | None]]:
    """The weighted sum of what was given; `None` where nothing was."""

    def total(*values: float | None) -> float | None:
        terms = [w * v for w, v in zip(SHARES.values(), values, strict=True) if v is not None]
        return math.fsum(terms) if terms else None

    return [[total(*pair) for pair in zip(*group, strict=True)] for group in zip(TOTALS, FORMATS, strict=True)]


@pytest.fixture
def trl_advantages(build: Build) -> Callable[..., list[float]]:
    """The advantages that TRL's own generation gives to completions with these rewards, in one row."""

    def compute(columns: Mapping[str, Sequence[Column]], **settings: Any) -> list[float]:
        groups, size = len(next(iter(columns.values()))), len(next(iter(columns.values()))[0])

        def rollouts(prompts: list[str], trainer: GRPOTrainer) -> Mapping[str, Any]:
            answers = [[97, 98, EOS] for _ in prompts]
            return {"prompt_ids": [[65, 66] for _ in prompts], "completion_ids": answers, "logprobs": None}

        trainer = build(
            rollouts=rollouts,
            parts=list(columns),
            per_device_train_batch_size=groups * size,
            num_generations=size,
            **settings,
        )
        made = trainer._generate_and_score_completions(rows(**{k: flat(v) for k, v in columns.items()}))
        return made["advantages"].tolist()

    return compute


def assert_same_advantages(theirs: Sequence[float], ours: Column) -> None:
    """TRL gives 0 to what could not be scored, and computes in float32."""
    assert theirs == pytest.approx([0.0 if a is None else a for a in ours], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("trl", "scale"), [("group", "std"), ("batch", "batch_std"), ("none", "none")])
@pytest.mark.parametrize("parts", ["one", "weighted"])
def test_advantages_are_those_of_trl(
    trl: str, scale: str, parts: str, trl_advantages: Callable[..., list[float]]
) -> None:
    cfg = Algorithm(scale=scale, **TRL_SCALING)
    if parts == "one":
        theirs = trl_advantages({"total": TOTALS}, scale_rewards=trl)
        ours = batch_advantages(TOTALS, cfg=cfg)
    else:
        columns = {"total": TOTALS, "format": FORMATS}
        theirs = trl_advantages(columns, scale_rewards=trl, reward_weights=list(SHARES.values()))
        ours = batch_advantages(weighted_totals(), cfg=cfg)
    assert_same_advantages(theirs, flat(ours))
    assert any(abs(a) > 0.1 for a in theirs)


@pytest.mark.parametrize("scale_rewards", ["group", "none"])  # which TRL does not look at here
def test_advantages_per_reward_are_those_of_trl(scale_rewards: str, trl_advantages: Callable[..., list[float]]) -> None:
    columns = {"total": TOTALS, "format": FORMATS}
    theirs = trl_advantages(
        columns,
        multi_objective_aggregation="normalize_then_sum",
        reward_weights=list(SHARES.values()),
        scale_rewards=scale_rewards,
    )
    gdpo = Algorithm(algorithm="gdpo")
    scores = [
        [None if t is f is None else {"total": t, "format": f} for t, f in zip(*group, strict=True)]
        for group in zip(TOTALS, FORMATS, strict=True)
    ]
    summed = flat(part_advantages(scores, SHARES, cfg=gdpo))
    assert_same_advantages(theirs, whiten(summed, ddof=gdpo.ddof, eps=gdpo.eps))


def test_truncated_completions_are_masked_as_in_trl(build: Build, scene: Scene) -> None:
    """They are not trained, but stay in the advantages of their group."""
    totals = [1.0, 0.0, 0.25, 2.0, -1.0, 0.5]
    trainer = build(mask_truncated_completions=True, num_generations=3, num_iterations=2)
    made = trainer._generate_and_score_completions(rows(total=totals))
    lengths = [0 if i in CUT_OFF else n for i, n in enumerate(LENGTHS)]
    assert made["completion_mask"].sum(1).tolist() == lengths
    assert made["num_items_in_batch"] == sum(lengths)
    ours = batch_advantages([totals[:3], totals[3:]], cfg=Algorithm(**TRL_SCALING))
    assert_same_advantages(made["advantages"].tolist(), flat(ours))


# -- RLOO ------------------------------------------------------------------------------------------------------------


def rloo_inputs(inputs: Inputs) -> Inputs:
    """The same with log-probs of whole sequences."""
    return {**inputs, "old_logps": (inputs["old_per_token_logps"] * inputs["completion_mask"]).sum(1)}


def test_the_loss_of_rloo_is_that_of_trl(build: Build, scene: Scene) -> None:
    trainer = build(RLOOTrainer, epsilon=0.05, epsilon_high=0.45)
    inputs = trl_inputs(build(num_iterations=2), scene)
    cfg = Algorithm(algorithm="rloo", clip_range=0.05, clip_range_high=0.45)
    logp = scene.logp.clone().requires_grad_()
    theirs = trl_loss(trainer, rloo_inputs(inputs), logp)
    ours = our_loss(cfg, inputs, logp)
    assert distance(theirs, ours) < EXACT
    assert distance(slopes(theirs, logp), slopes(ours, logp)) < EXACT

    weights = list(trainer.model.parameters())
    theirs = trainer._compute_loss(trainer.model, rloo_inputs(inputs))
    ours = our_loss(cfg, inputs, plain_forward(trainer.model, PROMPTS, COMPLETIONS)[0])
    assert distance(theirs, ours, TERM) < FLOAT32
    assert distance(slopes(theirs, *weights), slopes(ours, *weights)) < FLOAT32


@pytest.mark.parametrize("normalize", [False, True])
def test_the_advantages_of_rloo_are_those_of_trl(normalize: bool, folder: Path, build: Build) -> None:
    """With the KL of the old policy in the reward."""
    totals: list[list[float | None]] = [g for g in TOTALS if sum(r is not None for r in g) != 1]
    trainer = build(
        RLOOTrainer,
        beta=0.05,
        max_completion_length=4,
        normalize_advantages=normalize,
        num_generations=SIZE,
        per_device_train_batch_size=SIZE * len(totals),
    )
    nudge(trainer.model, seed=1, size=0.05)
    made = trainer._generate_and_score_completions(rows(total=flat(totals)))
    prompts = [ids[m.bool()].tolist() for ids, m in zip(made["prompt_ids"], made["prompt_mask"], strict=True)]
    answers = [ids[m.bool()].tolist() for ids, m in zip(made["completion_ids"], made["completion_mask"], strict=True)]
    with torch.no_grad():
        old, _ = plain_forward(trainer.model, prompts, answers)
        ref, _ = plain_forward(load(folder), prompts, answers)
    assert distance(made["old_logps"], old.sum(1)) < FLOAT32

    cfg = Algorithm(algorithm="rloo")
    assert (cfg.kl_coef, cfg.kl_in) == (0.05, "reward")
    penalties = (cfg.kl_coef * kl.estimate(old, ref, cfg.kl).sum(1)).view(-1, SIZE).tolist()
    rewards = [
        [None if r is None else r - penalty for r, penalty in zip(*pair, strict=True)]
        for pair in zip(totals, penalties, strict=True)
    ]
    ours = flat(batch_advantages(rewards, cfg=cfg))
    if normalize:
        ours = whiten(ours, **TRL_SCALING)
    assert_same_advantages(made["advantages"].tolist(), ours)


# -- the differences: in the advantages ------------------------------------------------------------------------------


def test_trl_divides_by_the_sample_deviation_and_ours_by_that_of_the_population(
    trl_advantages: Callable[..., list[float]],
) -> None:
    """By default: GRPO's definition has no Bessel correction, and 1e-4 is not small beside rewards of 0.001."""
    rewards = [0.0, 0.001, 0.002, 0.005]
    ours = batch_advantages([rewards], cfg=Algorithm())[0]
    spread = torch.tensor(rewards, dtype=torch.float64)
    factor = float((spread.std(correction=0) + 1e-8) / (spread.std() + 1e-4))
    assert factor < 0.9
    assert trl_advantages({"total": [rewards]}) == pytest.approx(
        [factor * (a or 0.0) for a in ours], rel=1e-5, abs=1e-6
    )


def test_trl_scales_the_rounding_of_equal_rewards_up_and_ours_gives_zero(
    trl_advantages: Callable[..., list[float]],
) -> None:
    """A group without spread has nothing to say; the last bit of a float32 mean divided by 1e-4 is not a signal."""
    rewards = [0.7] * 7
    assert batch_advantages([rewards], cfg=Algorithm(**TRL_SCALING)) == [[0.0] * 7]
    theirs = trl_advantages({"total": [rewards]})
    assert all(0 < abs(a) < 1e-3 for a in theirs)


def test_trl_keeps_a_lone_score_out_of_rloo_normalisation_and_ours_counts_it_as_zero(build: Build) -> None:
    """Nothing to compare with is an advantage of 0 wherever it occurs here; in TRL it is none at all."""
    totals: list[list[float | None]] = [[1.0, 0.0, 0.5, 2.0], [None, 3.0, None, None]]
    trainer = build(
        RLOOTrainer, beta=0.0, normalize_advantages=True, num_generations=SIZE, per_device_train_batch_size=2 * SIZE
    )
    theirs = trainer._generate_and_score_completions(rows(total=flat(totals)))["advantages"].tolist()
    first, second = batch_advantages(totals, cfg=Algorithm(algorithm="rloo"))
    assert second == [None, 0.0, None, None]
    assert_same_advantages(theirs, [*whiten(first, **TRL_SCALING), *second])
    ours = whiten([*first, *second], **TRL_SCALING)
    assert abs(theirs[0] - (ours[0] or 0.0)) > 1e-3


# -- the differences: in what is averaged ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "sapo", "luspo", "gmpo", "rloo"])
def test_trl_counts_masked_completions_in_its_mean_and_ours_does_not(name: str, build: Build, scene: Scene) -> None:
    """The mean is over what is trained; TRL's gradient shrinks by the share that is masked."""
    inputs = trl_inputs(build(num_iterations=2, mask_truncated_completions=True), scene)
    if name == "rloo":
        cfg, trainer = Algorithm(algorithm="rloo"), build(RLOOTrainer)
        theirs_in = rloo_inputs(inputs)
    else:
        cfg, trainer, theirs_in = CASES[name].ours, build(CASES[name].kind, **CASES[name].trl), inputs
    logp = scene.logp.clone().requires_grad_()
    theirs, ours = trl_loss(trainer, theirs_in, logp), our_loss(cfg, inputs, logp)
    share = (B - len(CUT_OFF)) / B
    assert distance(slopes(theirs, logp), share * slopes(ours, logp)) < EXACT
    if name not in ("gmpo", "rloo"):  # where TRL adds -A, without a gradient, for what is masked
        assert distance(theirs, share * ours) < EXACT


@pytest.mark.parametrize("name", ["dapo", "bnpo", "cispo", "vespo"])
def test_masked_completions_leave_a_token_mean_as_in_trl(name: str, build: Build, scene: Scene) -> None:
    trainer = build(num_iterations=2, mask_truncated_completions=True, **CASES[name].trl)
    inputs = trl_inputs(trainer, scene)
    logp = scene.logp.clone().requires_grad_()
    theirs, ours = trl_loss(trainer, inputs, logp), our_loss(CASES[name].ours, inputs, logp)
    assert distance(theirs, ours) < EXACT
    assert distance(slopes(theirs, logp), slopes(ours, logp)) < EXACT


def test_trl_trains_the_kl_of_unscorable_completions_and_ours_leaves_them_out(build: Build, scene: Scene) -> None:
    """A failed reward says nothing about a completion, so it has no part in the step."""
    totals = [1.0, 0.0, None, 2.0, -1.0, 0.5]
    lost = totals.index(None)
    trainer = build(num_iterations=2, num_generations=3, **GRPO, **KL)
    with given(trainer, scene.old, ref=scene.ref), torch.no_grad():
        inputs = trainer._generate_and_score_completions(rows(total=totals))
    ours = flat(batch_advantages([totals[:3], totals[3:]], cfg=Algorithm(**TRL_SCALING)))
    assert (inputs["advantages"][lost], ours[lost]) == (0.0, None)

    logp = scene.logp.clone().requires_grad_()
    theirs = slopes(trl_loss(trainer, inputs, logp), logp)
    cfg = CASES["grpo, KL"].ours
    assert distance(theirs, slopes(our_loss(cfg, inputs, logp), logp)) < EXACT  # were it a sample of advantage 0
    scored = torch.arange(B) != lost
    without = {**inputs, "completion_mask": inputs["completion_mask"] * scored[:, None]}
    left_out = slopes(our_loss(cfg, without, logp), logp).view(B, WIDTH)
    assert distance(theirs.view(B, WIDTH)[scored], (B - 1) / B * left_out[scored]) < EXACT
    assert theirs.view(B, WIDTH)[lost].any() and not left_out[lost].any()


def test_trl_takes_the_token_mean_of_each_micro_batch_in_bnpo_and_ours_that_of_the_step(
    build: Build, scene: Scene
) -> None:
    """How a step is cut into micro-batches is a matter of memory, and does not change our loss."""
    trainer = build(loss_type="bnpo", num_iterations=2, gradient_accumulation_steps=2, per_device_train_batch_size=3)
    inputs, cfg = trl_inputs(trainer, scene), CASES["bnpo"].ours
    theirs = sum(trl_loss(trainer, part(inputs, half), scene.logp[half], scene.entropy[half]) for half in HALVES)
    by_half = [our_loss(cfg, part(inputs, half), scene.logp[half]) for half in HALVES]
    assert distance(theirs, torch.stack(by_half).mean()) < EXACT
    assert distance(theirs, our_loss(cfg, inputs, scene.logp)) > 1e-3


def test_trl_divides_dapo_by_the_average_step_and_ours_by_the_tokens_of_this_one(build: Build, scene: Scene) -> None:
    """Where samples are made for several steps at once, TRL counts their tokens once for all of them."""
    trainer = build(loss_type="dapo", steps_per_generation=2, num_iterations=2, per_device_train_batch_size=3)
    inputs, cfg = trl_inputs(trainer, scene), Algorithm(algorithm="dapo", clip_range_high=0.2)
    for half in HALVES:
        step = part(inputs, half)
        theirs, ours = trl_loss(trainer, step, scene.logp[half]), our_loss(cfg, step, scene.logp[half])
        assert distance(theirs * (sum(LENGTHS) / 2), ours * sum(LENGTHS[half])) < EXACT
        assert distance(theirs, ours) > 0.1


def test_trl_takes_the_entropy_quantile_of_each_micro_batch_and_ours_that_of_the_step(
    build: Build, scene: Scene
) -> None:
    """Which tokens are trained does not depend on how the step is cut."""
    settings = {**GRPO, "top_entropy_quantile": 0.5}
    trainer = build(num_iterations=2, gradient_accumulation_steps=2, per_device_train_batch_size=3, **settings)
    inputs = trl_inputs(trainer, scene)
    cfg = Algorithm(kl_coef=0.0, selection="top_entropy", selection_share=0.5)
    weights = token_weights(LENGTHS, cfg.weighting)
    theirs = sum(trl_loss(trainer, part(inputs, half), scene.logp[half], scene.entropy[half]) for half in HALVES)
    by_half = [
        our_loss(cfg, part(inputs, half), scene.logp[half], scene.entropy[half], weights=weights[half])
        for half in HALVES
    ]
    assert distance(theirs, sum(by_half)) < EXACT
    assert distance(theirs, our_loss(cfg, inputs, scene.logp, scene.entropy)) > 1e-3


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "luspo"])
def test_trl_takes_the_token_mean_of_the_entropy_and_ours_weighs_it_like_the_loss(
    name: str, build: Build, scene: Scene
) -> None:
    """One weighting holds for surrogate, KL and entropy; they agree where it is the token mean."""
    trainer = build(num_iterations=2, entropy_coef=0.01, **CASES[name].trl)
    inputs, cfg = trl_inputs(trainer, scene), CASES[name].ours
    bare = our_loss(cfg, inputs, scene.logp)
    theirs = trl_loss(trainer, inputs, scene.logp, scene.entropy)
    assert distance(theirs, bare - 0.01 * scene.entropy[scene.mask].mean()) < EXACT
    weights = torch.tensor(token_weights(LENGTHS, cfg.weighting, WIDTH), dtype=torch.float64)
    ours = our_loss(cfg.model_copy(update={"entropy_coef": 0.01}), inputs, scene.logp, scene.entropy)
    assert distance(ours, bare - 0.01 * (weights @ scene.entropy.sum(1))) < EXACT
    assert distance(theirs, ours) > 1e-4


def test_trl_gives_the_entropy_bonus_to_selected_tokens_and_ours_to_all(build: Build, scene: Scene) -> None:
    """A selection is of the surrogate; KL and entropy hold for every trained token."""
    trainer = build(loss_type="bnpo", top_entropy_quantile=0.3, entropy_coef=0.01, num_iterations=2)
    inputs = trl_inputs(trainer, scene)
    cfg = Algorithm(algorithm="bnpo", selection="top_entropy", selection_share=0.3)
    bare = our_loss(cfg, inputs, scene.logp, scene.entropy)
    entropy_T = scene.entropy[scene.mask]
    high_T = entropy_T[entropy_T >= entropy_T.quantile(0.7)]
    assert distance(trl_loss(trainer, inputs, scene.logp, scene.entropy), bare - 0.01 * high_T.mean()) < EXACT
    ours = our_loss(cfg.model_copy(update={"entropy_coef": 0.01}), inputs, scene.logp, scene.entropy)
    assert distance(ours, bare - 0.01 * entropy_T.mean()) < EXACT


def test_trl_takes_the_mean_of_gmpo_over_selected_tokens_and_ours_refuses_to(build: Build, scene: Scene) -> None:
    """A sequence is trained by one number; with part of its tokens it would be another sequence."""
    trainer = build(GMPOTrainer, top_entropy_quantile=0.5, num_iterations=2, epsilon=0.1)
    inputs = trl_inputs(trainer, scene)
    logp = scene.logp.clone().requires_grad_()
    high = scene.mask & (scene.entropy >= scene.entropy[scene.mask].quantile(0.5))
    shorter = our_loss(CASES["gmpo"].ours, {**inputs, "completion_mask": high}, logp)
    theirs = slopes(trl_loss(trainer, inputs, logp, scene.entropy), logp)
    assert distance(theirs, high.any(1).double().mean() * slopes(shorter, logp)) < EXACT
    with pytest.raises(ValueError, match="set selection: all"):
        Algorithm(algorithm="gmpo", selection="top_entropy")


# -- the differences: in the terms of a token ------------------------------------------------------------------------


def test_trl_sets_the_cap_of_cispo_and_no_floor_and_ours_a_range_on_either_side(build: Build, scene: Scene) -> None:
    """TRL's epsilon_high is the largest weight; ours is 1 + clip_range_high, as it is in every other clip."""
    trainer = build(num_iterations=2, **CISPO)
    inputs = trl_inputs(trainer, scene)
    theirs = trl_loss(trainer, inputs, scene.logp)
    wide = Algorithm(algorithm="cispo", clip_range=1.0, clip_range_high=0.2)
    narrow = Algorithm(algorithm="cispo", clip_range=0.1, clip_range_high=0.2)
    assert (wide.clip_bounds[1], wide.clip_bounds[0]) == (CISPO["epsilon_high"], 0.0)
    assert distance(theirs, our_loss(wide, inputs, scene.logp)) < EXACT
    lifted = (0.9 - (scene.logp - scene.old).exp()).clamp(min=0)  # what our floor adds to the weight of a token
    advantages = inputs["advantages"][:, None]
    floor = -(lifted * advantages * scene.logp)[scene.mask].mean()
    assert floor.abs() > 1e-4
    assert distance(theirs + floor, our_loss(narrow, inputs, scene.logp)) < EXACT


def test_trl_bounds_gains_too_by_a_delta_inside_the_clip_and_ours_refuses_it(build: Build) -> None:
    """Above the clip, a bound on the ratio matters only where A < 0; below, it is another clip."""
    logp, inputs = numbers(
        torch.tensor([[1.15], [1.15]], dtype=torch.float64).log(),
        advantages=[1.0, -1.0],
        old_per_token_logps=torch.zeros(2, 1, dtype=torch.float64),
    )
    cut = trl_loss(build(delta=1.1, **GRPO), inputs, logp)
    assert cut.item() == pytest.approx((-1.1 + 1.15) / 2)  # the gain is cut, the clipped loss is not
    assert our_loss(Algorithm(kl_coef=0.0), inputs, logp).item() == pytest.approx(0.0)
    with pytest.raises(ValueError, match="dual_clip must be above the clip"):
        Algorithm(dual_clip=1.1)


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_trl_leaves_exponents_free_and_ours_stops_at_e_to_the_20(beta: float, build: Build) -> None:
    """So that float32 stays finite; up to there they are the same."""
    cfg = Algorithm(kl_coef=beta)
    trainer = build(beta=beta, use_bias_correction_kl=False, **GRPO)
    for far in (19.0, 25.0, 60.0):
        logp, inputs = numbers(
            torch.tensor([[0.0 if beta else far]], dtype=torch.float64),
            advantages=[-1.0],
            old_per_token_logps=torch.zeros(1, 1, dtype=torch.float64),
            ref_per_token_logps=torch.full((1, 1), far, dtype=torch.float64),
        )
        held = min(far, kl.EXPONENT_CAP)
        theirs, ours = (beta * (math.exp(x) - far - 1) + 1 if beta else math.exp(x) for x in (far, held))
        assert trl_loss(trainer, inputs, logp).item() == pytest.approx(theirs, rel=EXACT)
        assert our_loss(cfg, inputs, logp).item() == pytest.approx(ours, rel=EXACT)


def test_trl_corrects_the_kl_by_the_ratio_of_its_level_and_ours_by_that_of_the_token(
    build: Build, scene: Scene
) -> None:
    """The estimate is of single tokens, so its importance weight is the token's (DeepSeek-V3.2, eq. 7)."""
    trainer = build(num_iterations=2, beta=0.04, **GRPO, **SEQUENCE)
    inputs = trl_inputs(trainer, scene)
    lengths = torch.tensor(LENGTHS, dtype=torch.float64)
    log_ratio, k3 = scene.logp - scene.old, kl.estimate(scene.logp, scene.ref, "k3")
    of_sequence = (log_ratio.sum(1) / lengths).exp()
    bare = our_loss(CASES["gspo"].ours, inputs, scene.logp)
    theirs = bare + 0.04 * (of_sequence * k3.sum(1) / lengths).mean()
    ours = bare + 0.04 * ((log_ratio.exp() * k3).sum(1) / lengths).mean()
    assert distance(trl_loss(trainer, inputs, scene.logp), theirs) < EXACT
    cfg = Algorithm(algorithm="gspo", kl_coef=0.04, kl_gradient="weighted", **SEQUENCE_CLIP)
    assert distance(our_loss(cfg, inputs, scene.logp), ours) < EXACT
    assert distance(theirs, ours) > 1e-4


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask"])
def test_trl_bounds_the_mismatch_of_each_token_in_vespo_and_ours_the_weight_as_a_whole(
    mode: str, build: Build, scene: Scene
) -> None:
    """The weight falls off on both sides of 1 by itself; bounding its factors first makes it that of no policy."""
    settings = {"loss_type": "vespo", **corrected(mode)}
    trainer = build(rollouts=scripted(scene.sampler), vllm=True, num_iterations=2, **settings)
    inputs = trl_inputs(trainer, scene)
    cfg = Algorithm(algorithm="vespo", sampler_correction=mode, **BOUNDS)
    gap = scene.old - scene.sampler
    held = gap.clamp(math.log(0.9), math.log(1.1))
    if mode == "token_mask":  # a weight of 0 counts as 1e-8
        held = torch.where(gap == held, gap, math.log(1e-8))
    theirs = trl_loss(trainer, inputs, scene.logp)
    assert distance(theirs, our_loss(cfg, inputs, scene.logp, sampler=scene.old - held)) < EXACT
    assert distance(theirs, our_loss(cfg, inputs, scene.logp, sampler=scene.sampler)) > 1e-3


def test_trl_bounds_the_log_ratio_of_each_token_in_vespo_and_ours_that_of_the_sequence(build: Build) -> None:
    """The same for ratios of e^20 and more."""
    logp, inputs = numbers(
        torch.tensor([[24.0, -21.0]], dtype=torch.float64),
        advantages=[1.0],
        old_per_token_logps=torch.zeros(1, 2, dtype=torch.float64),
    )

    def weight(log_w: float) -> float:
        return math.exp(3 + 2 * log_w - 3 * math.exp(log_w))

    theirs, ours = trl_loss(build(loss_type="vespo"), inputs, logp), our_loss(CASES["vespo"].ours, inputs, logp)
    assert theirs.item() == pytest.approx(-weight(20.0 - 20.0) * (24.0 - 21.0) / 2)
    assert ours.item() == pytest.approx(-weight(24.0 - 21.0) * (24.0 - 21.0) / 2)
