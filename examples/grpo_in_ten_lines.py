"""GRPO in ten lines: a model, a reward, prompts, and your own loop. Here an untrained model learns to write digits."""

from groupwise import GRPOConfig, GRPOTrainer, RewardComposer


def digits(prompt, response):
    return sum(c.isdigit() for c in response) / max(1, len(response))


reward = RewardComposer({"digits": 1.0}, parts={"digits": digits})
config = GRPOConfig(group_size=8, clip_range=0.2, kl_coef=0.04, ppo_epochs=1, lr=3e-3, max_tokens=16)
trainer = GRPOTrainer("builtin:tiny", reward_model=reward, config=config)
for step in range(20):
    metrics = trainer.train_step(["Count to five.", "从一数到五。", "What is 2 + 2?", "Write a number."])
    print(f"step {step:2d}  reward {metrics['reward/total']:.2f}  KL {metrics['policy/kl_ref']:.3f}")
